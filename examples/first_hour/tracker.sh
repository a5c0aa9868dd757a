# Send figures and tables of a run to MLflow.
# Have: an MLflow server, here a local database
# Get: all numbers of the run in `tracked.db`, its tables and figures in `tracked`
lightning-sym fit --config zoo/digits_mlp --model.members 2 --trainer.max_epochs 2 --run_dir runs/tracked \
    --trainer.logger MLFlowLogger --trainer.logger.experiment_name symmetry \
    --trainer.logger.tracking_uri sqlite:///tracked.db --trainer.logger.artifact_location tracked
