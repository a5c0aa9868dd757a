# How degenerate is the minimum?
# Have: first.pt, and its class in my_networks.py
# Get: the coefficient, or why there is none, `runs/learning-coefficient/results/learning_coefficient.csv`
lightning-sym learning-coefficient first.pt --network my_networks.Plain --data DigitsDataModule \
    --trainer.callbacks.localisation 3000 --trainer.callbacks.steps 200 --trainer.callbacks.chains 4
