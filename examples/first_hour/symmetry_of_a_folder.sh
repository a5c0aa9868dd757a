# What is the symmetry of a transformer on your disk?
# Have: a folder of transformers, llama
# Get: the dimension of its symmetry group, without memory for weights, `llama.json`
python -c "
from transformers import LlamaConfig
LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=100, architectures=['LlamaForCausalLM']).save_pretrained('llama')"
lightning-sym symmetry transformers:llama/config.json --meta --out llama.json
