# Train your network by another loss.
# Have: the path of a function of outputs and targets
# Get: the test loss of a regression by the Huber loss, `runs/robust/results/members.csv`
lightning-sym fit --config zoo/diabetes --model.loss torch.nn.functional.huber_loss --model.prior_precision null \
    --trainer.callbacks '[ZooReport]' --model.members 2 --trainer.max_epochs 3 --run_dir runs/robust
