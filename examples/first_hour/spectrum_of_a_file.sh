# How sharp is the minimum, and how much of it is symmetry?
# Have: first.pt, and its class in my_networks.py
# Get: top eigenvalue and trace of the Hessian, raw and modulo symmetry, `runs/spectrum/results/sharpness.csv`
lightning-sym spectrum first.pt --network my_networks.Plain --data DigitsDataModule \
    --trainer.callbacks.train_batches 1 --trainer.callbacks.steps 10 --trainer.callbacks.trace_probes 4
