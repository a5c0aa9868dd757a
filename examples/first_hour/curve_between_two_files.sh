# Is there a path of low loss between two networks?
# Have: first.pt and second.pt, and their class in my_networks.py
# Get: loss barriers of the line, after matching and along a curve, `runs/curve/results/summary.csv`
lightning-sym curve first.pt second.pt --network my_networks.Plain --data DigitsDataModule \
    --trainer.max_epochs 3 --trainer.callbacks.plane_points 3
