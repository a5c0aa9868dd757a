# Make a zoo of checkpoints for recipes.
# Have: first.pt and second.pt, and their class in my_networks.py
# Get: their test accuracies, and the zoo `mine`
lightning-sym import first.pt second.pt --network my_networks.Plain --data DigitsDataModule --out mine
