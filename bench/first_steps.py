"""first_steps: short scripts of each library with us and without, what differs between the two, and
the seconds to their first step.

A recipe has both scripts: lines that begin with ``+`` are of ours only, with ``-`` of the plain one
only. Each is run by a process of its own, from its start, imports and all, to the end of its first
step.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from infinity.tools.bench.results import Row, row
from infinity.tools.bench.rounds import Times, alternate, paired

HOME = {"params": "host", "optimizer": "host"}

MODEL = """
  import torch, transformers
  config = transformers.LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=256,
                                    num_hidden_layers=2, num_attention_heads=2)
  model = transformers.LlamaForCausalLM(config)
  rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(512, (2, 32))]
"""

RECIPES = {
    "loop": (
        """
+ import infinity
  optimizer = torch.optim.AdamW(model.parameters())
+ model, optimizer = infinity.wrap_model(model, optimizer, HOME)
  model(**torch.utils.data.default_collate(rows)).loss.backward()
  optimizer.step()
"""
    ),
    "transformers": (
        """
- from transformers import Trainer
+ from infinity.integrations import InfinityTrainer
  args = transformers.TrainingArguments(max_steps=1, report_to=[], save_strategy="no", use_cpu=True,
                                        disable_tqdm=True)
- Trainer(model=model, args=args, train_dataset=rows).train()
+ InfinityTrainer(model=model, args=args, train_dataset=rows, infinity=HOME).train()
"""
    ),
    "accelerate": (
        """
- from accelerate import Accelerator
+ from infinity.integrations import InfinityAccelerator
- accelerator = Accelerator(cpu=True)
+ accelerator = InfinityAccelerator(cpu=True, infinity=HOME)
  model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
  accelerator.backward(model(**torch.utils.data.default_collate(rows)).loss)
  optimizer.step()
"""
    ),
    "lightning": (
        """
  import lightning
+ from infinity.integrations import InfinityStrategy
  class Tuned(lightning.LightningModule):
      def __init__(self):
          super().__init__()
          self.model = model
      def training_step(self, batch, number):
          return self.model(**batch).loss
      def configure_optimizers(self):
          return torch.optim.AdamW(self.parameters())
  quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False,
               enable_model_summary=False, accelerator="cpu", devices=1)
- trainer = lightning.Trainer(max_steps=1, **quiet)
+ trainer = lightning.Trainer(max_steps=1, strategy=InfinityStrategy(HOME), **quiet)
  trainer.fit(Tuned(), torch.utils.data.DataLoader(rows))
"""
    ),
}


def script(name: str, *, ours: bool) -> str:
    """Returns one of the two scripts of a recipe, without the home that it is given."""
    lines = (MODEL + RECIPES[name]).splitlines()
    return "\n".join(line[2:] for line in lines if line[:1] != ("-" if ours else "+"))


def lines_changed(name: str) -> int:
    """Counts the lines that a user adds or changes."""
    return sum(line.startswith("+") for line in RECIPES[name].splitlines())


def rows_of(names: Sequence[str], folder: str, rounds: int) -> list[Row]:
    """Measures, for each of ``names``, rows ``integrations.<name>.first_step`` (s; the ratio
    ``plain`` is to the script without us), ``.lines`` and ``.options``."""
    jobs = {
        (name, ours): lambda name=name, ours=ours: _run(name, ours, folder)
        for name in names
        for ours in (True, False)
    }
    times = alternate(
        {f"{name}.{ours}": job for (name, ours), job in jobs.items()}, rounds, warm_up=0
    )  # the median is a warm one
    rows = []
    for name in names:
        ours, plain = times[f"{name}.True"].wall, times[f"{name}.False"].wall
        rows.append(
            row(f"integrations.{name}.first_step", "s", ours, ratios={"plain": paired(ours, plain)})
        )
        rows.append(row(f"integrations.{name}.lines", "lines changed", [lines_changed(name)]))
        rows.append(row(f"integrations.{name}.options", "options set", [len(HOME)]))
    return rows


def _run(name: str, ours: bool, folder: str) -> Times:
    """Raises CalledProcessError, with what the script said, where it fails."""
    text = f"HOME = {HOME!r}\n{script(name, ours=ours)}\nimport time\nprint('ended', time.time())"
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-P", "-c", text], capture_output=True, text=True, cwd=folder, check=True
    )
    ended = next(
        float(line.split()[1])
        for line in reversed(done.stdout.splitlines())
        if line.startswith("ended")
    )
    return Times([ended - began], [0.0])
