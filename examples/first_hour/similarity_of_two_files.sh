# How similar are the layers of two networks?
# Have: first.pt and second.pt, and their class in my_networks.py
# Get: linear CKA of each layer, also of untrained networks, `runs/similarity/results/summary.csv`
lightning-sym similarity first.pt second.pt --network my_networks.Plain --data DigitsDataModule \
    --model.measures '[cka_linear, group]'
