# Write the curves of a run for your spreadsheet.
# Have: any recipe
# Get: losses and accuracies of all epochs, `tables/mine/version_0/metrics.csv`
lightning-sym fit --config zoo/digits_mlp --model.members 2 --trainer.max_epochs 2 --run_dir runs/logged \
    --trainer.logger CSVLogger --trainer.logger.save_dir tables --trainer.logger.name mine
