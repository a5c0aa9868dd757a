# How probable are the labels, with the weights averaged out?
# Have: first.pt, and its class in my_networks.py
# Get: -L/N, the negative log evidence per image, `runs/evidence/results/evidence.csv`
lightning-sym evidence first.pt --network my_networks.Plain --data DigitsDataModule
