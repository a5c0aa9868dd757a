# Merge two fine-tunes of a language model by TIES.
# Have: folders of transformers: parent, code, maths
# Get: the folder `merged` for from_pretrained, and the conflicts of signs in `merged-report/differences.csv`
python -c "
from transformers import GPT2Config, GPT2LMHeadModel as Model
model = Model(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))
for name in ('parent', 'code', 'maths'):
    model.save_pretrained(name)
    model.transformer.h[0].mlp.c_fc.weight.data[:2] += 0.01"
lightning-sym merge code maths --base parent --method ties --density 0.5 --out merged
