"""Fine-tuning with TRL's SFTTrainer: rows of data to tokens, the run, its checkpoints."""
