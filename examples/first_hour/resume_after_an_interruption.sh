# Resume a run that was killed.
# Have: a run in runs/long that was killed after its first epochs
# Get: a finished run, with the losses of all epochs in `runs/long/metrics.csv`
lightning-sym fit --config zoo/digits_mlp --model.members 2 --trainer.max_epochs 15 --run_dir runs/long &
while [ ! -f runs/long/checkpoints/last.ckpt ]; do sleep 0.1; done
kill -9 $!
lightning-sym fit --config zoo/digits_mlp --model.members 2 --trainer.max_epochs 15 --run_dir runs/long \
    --ckpt_path last
