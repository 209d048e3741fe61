"""A classifier, as the examples of torch train one: options, epochs, a schedule, a test, a file."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(4 * 3 * 3, 10)

    def forward(self, images):
        hidden = F.max_pool2d(F.relu(self.norm(self.conv(images))), 2)
        return F.log_softmax(self.head(self.dropout(hidden.flatten(1))), dim=1)


def train(model, device, loader, optimizer, epoch):
    model.train()
    for step, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"Train Epoch: {epoch} [{step}/{len(loader)}]\tLoss: {loss.item():.6f}")


def test(model, device, loader):
    model.eval()
    total, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            output = model(images)
            total += F.nll_loss(output, labels, reduction="sum").item()
            correct += output.argmax(1).eq(labels).sum().item()
    print(f"Test set: Average loss: {total / len(loader.dataset):.4f}, Accuracy: {correct}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--optimizer", default="Adadelta")
    parser.add_argument("--save-model", metavar="FILE")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cpu")
    images, labels = torch.randn(24, 1, 8, 8), torch.randint(10, (24,))
    data = torch.utils.data.TensorDataset(images, labels)
    train_loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    test_loader = torch.utils.data.DataLoader(data, batch_size=12)
    model = Net().to(device)
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    print(model, optimizer.param_groups[0]["lr"], scheduler.get_last_lr())
    if args.save_model:
        torch.save(model.state_dict(), args.save_model)
        for name, value in torch.load(args.save_model).items():
            print(name, tuple(value.shape), value.double().sum().item())


if __name__ == "__main__":
    main()
