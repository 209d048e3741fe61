"""A generator and a discriminator with an optimizer each, as DCGAN's example trains them."""

import torch
from torch import nn


def weights_init(module):
    if isinstance(module, nn.ConvTranspose2d | nn.Conv2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 1, 4, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, images):
        return self.main(images).view(-1)


torch.manual_seed(999)
netG, netD = Generator().to("cpu"), Discriminator().to("cpu")
netG.apply(weights_init)
netD.apply(weights_init)
criterion, fixed = nn.BCELoss(), torch.randn(2, 6, 1, 1)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999), fused=True)
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999), fused=True)
for step in range(4):
    netD.zero_grad()
    real = torch.randn(4, 1, 8, 8)
    output = netD(real)
    errD_real = criterion(output, torch.ones(4))
    errD_real.backward()
    fake = netG(torch.randn(4, 6, 1, 1))
    errD_fake = criterion(netD(fake.detach()), torch.zeros(4))
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    errG = criterion(netD(fake), torch.ones(4))
    errG.backward()
    optimizerG.step()
    print(f"[{step}/4] Loss_D: {errD_real + errD_fake:.6f} Loss_G: {errG.item():.9f}")
with torch.no_grad():
    print(f"{netG(fixed).double().sum().item():.9f}")
print({name: round(value.double().sum().item(), 6) for name, value in netD.state_dict().items()})
