# Find weights of the same function that round better.
# Have: first.pt, and its class in my_networks.py
# Get: the losses of both after rounding to 3 bits, `rounds.report.json`, and `rounds.safetensors`
lightning-sym reparametrize first.pt --network my_networks.Plain --data DigitsDataModule \
    --objective quantization_error --objective.bits 3 --max_steps 30 --out rounds.safetensors
