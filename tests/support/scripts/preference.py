"""TRL's SFTTrainer and DPOTrainer on samples of a chat, as its scripts run them."""

import sys

import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

kind, *words = sys.argv[1:]
Config = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig}[kind]
parser = transformers.HfArgumentParser(Config)
(args,) = parser.parse_args_into_dataclasses(words)

vocabulary = (
    "<pad> <s> </s> <unk> what is one and two three sky grass blue green red yes no".split()
)
plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, "<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
transformers.set_seed(args.seed)
config = transformers.LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
transformers.LlamaForCausalLM(config).save_pretrained("base")
model = transformers.AutoModelForCausalLM.from_pretrained("base")
prompts = ["what is one and one", "what is sky", "what is grass", "what is red"] * 3
if kind == "sft":
    rows = {"text": [f"{prompt} {answer}" for prompt, answer in zip(prompts, vocabulary[8:] * 2)]}
    Trainer = trl.SFTTrainer
else:
    rows = {"prompt": prompts, "chosen": [" blue"] * 12, "rejected": [" no green"] * 12}
    Trainer = trl.DPOTrainer
data = Dataset.from_dict(rows)
trainer = Trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
result = trainer.train()
KEPT = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy", "rewards/margins")
for entry in trainer.state.log_history:
    print({name: value for name, value in entry.items() if name in KEPT})
trainer.save_model(args.output_dir)
again = transformers.AutoModelForCausalLM.from_pretrained(args.output_dir)
print(result.training_loss, sum(p.double().sum().item() for p in again.parameters()))
