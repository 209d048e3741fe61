"""A LightningModule that is fitted and tested: its own training_step, schedule and metrics."""

import logging
import warnings

import lightning
import torch
from torch import nn

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def loss_of(self, batch):
        inputs, labels = batch
        logits = self.head(self.body(inputs)) * self.scale
        return nn.functional.cross_entropy(logits, labels)

    def training_step(self, batch, index):
        loss = self.loss_of(batch)
        print(f"step {self.global_step}: {loss.item():.9f}")
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


lightning.seed_everything(5, verbose=False)
data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(4, (16,)))
loader = torch.utils.data.DataLoader(data, batch_size=4)
module = Classifier()
options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
trainer = lightning.Trainer(max_epochs=2, enable_model_summary=False, **options)
trainer.fit(module, loader, loader)
print(trainer.callback_metrics["val_loss"].item(), trainer.optimizers[0].param_groups[0]["lr"])
trainer.save_checkpoint("fitted.ckpt")
again = Classifier.load_from_checkpoint("fitted.ckpt")
print(sum(p.double().sum().item() for p in again.parameters()))
