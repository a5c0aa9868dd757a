# What can be permuted, scaled or flipped in your network?
# Have: the network in my_networks.py
# Get: the dimension of its symmetry group and the number of permutations, `symmetry.json`
lightning-sym symmetry my_networks.Plain --network.width 4 --input 1,8,8 --out symmetry.json
