# Train several networks of your own class at once.
# Have: the network in my_networks.py
# Get: test accuracies of three members, and the zoo `runs/plain/zoo`
lightning-sym fit --config zoo/digits_mlp --model.network my_networks.Plain --model.network.width 4 \
    --model.members 3 --trainer.max_epochs 3 --run_dir runs/plain
