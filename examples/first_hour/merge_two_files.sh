# Average two networks that were trained apart.
# Have: first.pt and second.pt, and their class in my_networks.py
# Get: accuracies of both and of the mean, unaligned and aligned, `merged-report/networks.csv`, `merged.safetensors`
lightning-sym merge first.pt second.pt --network my_networks.Plain --data DigitsDataModule \
    --recalibrate --out merged.safetensors
