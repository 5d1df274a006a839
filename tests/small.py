"""Settings of a run that is as small as a run can be: a byte-level model of a few thousand numbers on 60 kB of text."""

SMALL = [
    "model=micro",
    "data.tokenizer=bytes",
    "data.max_bytes=60000",
    "data.heldout_share=0.2",
    "data.seq_len=32",
    "data.block_samples=32",
    "train.batch_size=2",
    "diloco.fragments=2",
]
