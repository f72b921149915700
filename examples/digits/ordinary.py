"""An ordinary image classification: a small network learns to read scikit-learn's handwritten digits.

python examples/digits/ordinary.py [--epochs 10] [--out runs.jsonl] …
"""

import torch
import torch.nn.functional as F
from run import Run
from task import arguments, batches, digits, network

options = arguments(__doc__).parse_args()
learned, tested = digits()
model = network(options.width).to(options.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

run = Run(options)
for _ in range(options.epochs):
    for images, targets in batches(learned, options.batch):
        loss = F.cross_entropy(model(images.to(options.device)), targets.to(options.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.learned(loss.item())
    images, targets = (part.to(options.device) for part in tested)
    with torch.no_grad():
        scores = model(images)
    right = (scores.argmax(1) == targets).sum().item()
    run.tested(F.cross_entropy(scores, targets).item(), right / len(targets))
run.write(stages=1)
