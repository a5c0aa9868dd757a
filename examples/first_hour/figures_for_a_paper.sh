# Draw figures as wide as the column of a paper.
# Have: first.pt and second.pt, or any recipe
# Get: figures as PDF, 3.25 inches wide, `runs/similarity/results/depth.pdf`
lightning-sym similarity first.pt second.pt --network my_networks.Plain --data DigitsDataModule \
    --model.measures '[cka_linear]' --figures pdf --figure_size column
