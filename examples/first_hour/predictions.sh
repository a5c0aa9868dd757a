# Get the outputs of trained networks.
# Have: a finished run in runs/digits
# Get: probabilities of all members on the test images, `runs/digits/results/predictions.safetensors`
lightning-sym fit --config zoo/digits_mlp --model.members 2 --trainer.max_epochs 3 --run_dir runs/digits
lightning-sym predict --config zoo/digits_mlp --model.members 2 --run_dir runs/digits --ckpt_path last
