# Align one network to another; its function stays the same.
# Have: first.pt and second.pt, and their class in my_networks.py
# Get: the distance before and after, and `aligned.safetensors`
lightning-sym merge first.pt second.pt --network my_networks.Plain --data DigitsDataModule \
    --align activations --align-only --out aligned.safetensors
