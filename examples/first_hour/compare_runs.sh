# Which of two learning rates is better, and is the difference more than chance?
# Have: any recipe
# Get: test accuracies with 95 % intervals, `rates/comparison.csv`
for lr in 0.001 0.01; do
    for seed in 0 10; do
        lightning-sym fit --config zoo/digits_mlp --model.members 2 --trainer.max_epochs 2 --model.seed $seed \
            --model.optimizer.lr $lr --run_dir runs/$lr-$seed
    done
done
lightning-sym compare runs/0.001-* runs/0.01-* --metrics 'test/*' --out rates
