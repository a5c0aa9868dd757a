# Publish your own table, figure and final numbers at the end of a run.
# Have: the report in my_report.py, here of the norms of layers
# Get: `runs/sizes/results/sizes.csv` and `runs/sizes/results/sizes.png`
lightning-sym fit --config zoo/digits_mlp --model.members 2 --trainer.max_epochs 2 \
    --trainer.callbacks+ my_report.SizeReport --run_dir runs/sizes
