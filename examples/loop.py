"""The ordinary PyTorch loop with the two lines changed: a small Llama on random tokens.

python examples/loop.py [device]
"""

import sys

import torch
import transformers

import stronghold

device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
config = transformers.LlamaConfig(
    vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4
)
model = transformers.LlamaForCausalLM(config)

model = stronghold.offload(model, window=2, device=device)
optimizer = stronghold.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
tokens = torch.randint(0, 1000, (4, 64), device=device)
for step in range(10):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step + 1:2}  loss {loss.item():.4f}")
print(stronghold.report(model))
