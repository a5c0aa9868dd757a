# Train on your own data set from the command line, with a prior that is learned.
# Have: the data set in my_data.py
# Get: the log evidence of each member in `runs/bars/results/evidence.csv`
lightning-sym fit --config zoo/digits_mlp --data DatasetDataModule --data.dataset my_data.Bars \
    --data.dataset.height 1.5 --model.members 2 --model.prior_precision 1 --trainer.max_epochs 6 \
    --trainer.callbacks+ MarginalLikelihood --trainer.callbacks.burn_in 5 --run_dir runs/bars
