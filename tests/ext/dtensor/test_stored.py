"""Distributed parameters at rest: gathered for their local part and for all of it."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from lone import lone_group
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from infinity import native
from infinity.core.units.flat_param import FlatParam
from infinity.core.units.flat_param_spec import FlatParamSpec
from infinity.core.units.handle import ParamHandle
from infinity.ext.dtensor.stored import StoredDTensor

F32 = torch.float32
SPEC = FlatParamSpec(F32, F32, native.Master.OWN, F32, F32, (), stepped=True)


class Job:
    """The engine and unit of one parameter, which lets everything be done."""

    def __init__(self) -> None:
        self.computing, self.said, self.inside, self.uses = False, [], [], self

    @contextmanager
    def block(self, name: str):
        self.inside.append(name)
        yield
        self.inside.pop()

    def begin(self):
        return self.block("use")

    def saving_tensors(self):
        return self.block("saving")

    def touch(self, handle, what: str) -> None:
        self.said.append(f"{what} of {handle.name} inside {self.inside}")


def test_a_distributed_parameter_is_gathered_for_its_local_part_and_for_all_of_it():
    """Claim: its detached tensor is under the same rules."""
    job = Job()
    with lone_group():
        mesh = dist.init_device_mesh("cpu", (1,))
        param = torch.nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
        flat_param = FlatParam(SPEC, [param])
        param._infinity = ParamHandle(["d"], job, flat_param, 0, job)
        param.__class__ = StoredDTensor
        alias = param.detach()
        assert type(alias) is StoredDTensor and alias._infinity is param._infinity
        assert not alias.requires_grad and job.said == []
        uses = {
            "to_local": lambda tensor: tensor.to_local(),
            "full_tensor": lambda tensor: tensor.full_tensor(),
            "redistribute": lambda tensor: tensor.redistribute(placements=[Replicate()]).to_local(),
        }
        for name, use in uses.items():
            for tensor in (param, alias):
                param.__class__ = StoredDTensor
                assert use(tensor).tolist() == [0, 1, 2, 3]
                assert job.said.pop() == f"{name} of d inside ['use']" and job.said == []
                assert type(param) is DTensor
        param.__class__, job.computing = StoredDTensor, True
        assert (param + 1).to_local().tolist() == [1, 2, 3, 4]
        assert type(param) is StoredDTensor and job.said[0] == "add of d inside ['use']"
