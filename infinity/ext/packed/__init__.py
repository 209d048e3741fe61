"""Weights in the packed forms of bitsandbytes, torchao, HQQ and GPTQ."""
