"""Wrong uses of the Python API: what people mistype, mix up or misunderstand.

Words used here:

**scene**: `s`, a plain model with its optimizer, a wrapped one with its own, and a folder.
**use**: statements with a scene. The last one is wrong, and raises. `inside` enters a context.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deleted import is_deleted
from torch import nn

import infinity
from infinity import (
    CapacityError,
    Config,
    ConfigError,
    StorageError,
    UsageError,
    integrations,
    parallel,
)

ONLY_IN_USES = copy, io, parallel, pickle
# What is in a use -> the folder whose words its error has
FOLDERS = {
    "wrap_model(s.model, s.optimizer)": "ext/class_step",
    "'parms'": "ext/migrate",
    "'expects_optimizer': {'type'": "ext/migrate",
    "'trace': 'notes.txt'": "tools",
}
NEEDED = {"rainer(": "transformers", "ccelerator(": "accelerate", "Strategy": "lightning"}
NEEDED |= {"merge": "peft"}  # part of a use -> library

HOST = {"params": "host", "optimizer": "host"}
DISK = {"params": "nvme", "optimizer": "nvme"}
ROWS = torch.ones(2, 8)
FILES = {
    "notes.txt": "mine",
    "list.json": "[1]",
    "nvme/keep": "",
    "trainer/trainer_state.json": "{}",
    "dcp/.metadata": "",
    "deepspeed/latest": "global_step1",
    "hub/config.json": "{}",
    "hub/model.safetensors": "",
}

FIRST = "call infinity.wrap_model"
SIZE = "give bytes as a whole number, or text such as '48GiB'"
SUPPORTED = "Supported are torch.optim.AdamW, Adam, SGD"
UNWRAP = "unwrap_model it first"
PLAIN_ONE = "give wrap_model the plain one, or unwrap_model first"
HOMES = "one of 'auto', 'device', 'host', 'nvme'"
FORMS = "give a Config, a dict, or the path of a file"
DEVICES = "give 'cuda', 'cuda:1' or 'cpu'"
BEFORE = "Choose them before: infinity.Config.* or model.to.* before wrap_model"
AGAIN = "unwrap_model.* first, do it, and wrap again"
FULL = "inside `with infinity.full_params"
ITS_OWN = "the one that wrap_model returned with this model"
RETURNED = "Use the model and the optimizer that unwrap_model returned"
HOLDS = "use dicts, lists, numbers, strings, tensors"
DECAY = "give a number from 0 to 1"
CLIP = "use torch.nn.utils.clip_grad_norm_"

Row = tuple[type[Exception], str, str]
USES: dict[str, Row] = {  # use -> its error, patterns of the cause and of the remedy
    # --- wrap_model: the optimizer ---
    "s.wrap(adamw(plain()))": (ConfigError, "none is one of the model's", "from model.parameters"),
    "step = scheduler(s.adamw); s.wrap(step)": (ConfigError, "StepLR is a wrapper", "AdamW itself"),
    "s.wrap([s.adamw, adamw(s.plain)])": (ConfigError, "optimizers 0 and 1", "give each parameter"),
    "s.wrap(torch.optim.LBFGS(s.plain.parameters()))": (ConfigError, "LBFGS is not", SUPPORTED),
    "s.wrap(torch.optim.SparseAdam(s.plain.parameters()))": (
        ConfigError,
        "SparseAdam is not",
        SUPPORTED,
    ),
    "s.wrap(adamw(s.plain, capturable=True))": (ConfigError, "capturable=True", "capturable=False"),
    "s.wrap(s.optimizer)": (UsageError, "this optimizer is wrapped already", PLAIN_ONE),
    "infinity.wrap_model(s.model, s.optimizer)": (UsageError, "is wrapped already", PLAIN_ONE),
    # --- wrap_model: the model ---
    "s.wrap(); s.wrap()": (UsageError, "0.weight is wrapped already", UNWRAP),
    "infinity.wrap_model(s.model[0])": (UsageError, "weight is wrapped already", UNWRAP),
    "infinity.wrap_model(nn.Sequential(s.model))": (UsageError, "wrapped already", UNWRAP),
    "infinity.wrap_model(nn.DataParallel(s.plain))": (ConfigError, "DataParallel", "model inside"),
    "infinity.wrap_model(nn.LazyLinear(3))": (
        ConfigError,
        "not initialised yet",
        "run one forward",
    ),
    "s.wrap(mesh='dp')": (ConfigError, "is not initialised", "call init_process_group first"),
    "s.set('WORLD_SIZE', '2'); s.wrap()": (
        ConfigError,
        "2 that were launched",
        "remove WORLD_SIZE",
    ),
    # --- wrap_model: the configuration ---
    "s.wrap(None, 3)": (ConfigError, "config is a int", FORMS),
    "s.wrap(None, ['host'])": (ConfigError, "config is a list", FORMS),
    "s.wrap(None, {'parms': 'host'})": (ConfigError, "key 'parms'", "did you mean 'params'"),
    "s.wrap(None, DISK)": (ConfigError, "params='nvme' needs a folder", "Config.nvme_paths="),
    "s.wrap(None, DISK | {'nvme_paths': 'nowhere'})": (ConfigError, "no folder", "Create it, or"),
    "s.wrap(s.adamw, HOST | {'host_memory': '100KiB'})": (
        CapacityError,
        "host_memory is 100.0 KiB .* the least that works here is 132.0 KiB",
        "Raise host_memory by 32.0 KiB: Config.host_memory=135168",
    ),
    "s.wrap(s.adamw, {'device_memory': '20KiB'})": (
        CapacityError,
        "device_memory is 20.0 KiB",
        "Raise device_memory by .*: Config.device_memory=",
    ),
    "s.wrap(s.adamw, DISK | {'nvme_paths': 'nvme', 'nvme_capacity': '10KiB'})": (
        CapacityError,
        "nvme_capacity is 10.0 KiB",
        "Raise nvme_capacity by .* or keep more on the host",
    ),
    "s.wrap(None, HOST | {'units': ['Block']})": (ConfigError, "class Block", "has Linear, Sequ"),
    "s.wrap(None, HOST | {'trace': 'notes.txt'})": (ConfigError, "not made by", "another name"),
    "s.wrap(s.adamw, HOST | {'expects_optimizer': {'type': 'SGD'}})": (
        ConfigError,
        "is AdamW.*expects SGD",
        "Give that one, or leave it to the loop",
    ),
    # --- Config ---
    "Config(params='gpu')": (ConfigError, "params='gpu'", "did you mean 'device'"),
    "Config(params='Host')": (ConfigError, "params='Host'", "did you mean 'host'"),
    "Config(params=['host'])": (ConfigError, "params=.'host'.", "did you mean 'host'"),
    "Config(params=None)": (ConfigError, "params=None", HOMES),
    "Config(optimizer='adamw')": (ConfigError, "optimizer='adamw'", HOMES),
    "Config(activations='recompute')": (ConfigError, "activations='recompute'", HOMES),
    "Config(host_memory='8 gigs')": (ConfigError, "'8 gigs' is not a size", SIZE),
    "Config(host_memory='50%')": (ConfigError, "'50%' is not a size", SIZE),
    "Config(host_memory=-1)": (ConfigError, "=-1 is not a size", SIZE),
    "Config(host_memory=float('nan'))": (ConfigError, "=nan is not a size", SIZE),
    "Config(host_memory=True)": (ConfigError, "=True is not a size", SIZE),
    "Config(host_memory=b'8GiB')": (ConfigError, "=b'8GiB' is not a size", SIZE),
    "Config(device_memory={0: '24GiB'})": (ConfigError, "'24GiB'. is not a size", SIZE),
    "Config(nvme_paths=[3])": (ConfigError, "nvme_paths=.3.", "must be text, or a list of it"),
    "Config(weights_on_host='1B')": (ConfigError, "'1B'", "must be a number of elements"),
    "Config(param_dtype='int8')": (ConfigError, "='int8'", "not one of fp32, bf16, fp16, or None"),
    "Config(param_dtype=torch.float64)": (ConfigError, "torch.float64", "of fp32, bf16, fp16, or"),
    "Config(master='bf16')": (ConfigError, "master='bf16'", "one of 'split', 'fp32', 'none'"),
    "Config(moments='int4')": (ConfigError, "moments='int4'", "did you mean 'int8'"),
    "Config(units=[nn.Linear])": (ConfigError, "units=.*Linear", "must be text, or a list of it"),
    "Config(shard='FULL_SHARD')": (ConfigError, "shard='FULL_SHARD'", "'gradients', 'parameters'"),
    "Config(shard=3)": (ConfigError, "shard=3", "one of 'optimizer', 'gradients', 'parameters'"),
    "Config(shard_in_node='yes')": (ConfigError, "shard_in_node='yes'", "must be True or False"),
    "Config.make({'reduction': 'fast'})": (ConfigError, "key 'reduction'", "unknown config key"),
    "Config(share_homes='auto')": (ConfigError, "share_homes='auto'", "must be True, False, or"),
    "Config(device=1.5)": (ConfigError, "device=1.5 is not a device", DEVICES),
    "Config(device='gpu')": (ConfigError, "device='gpu' is not a device", DEVICES),
    "Config(update_threads=0)": (ConfigError, "update_threads=0", "a positive number or None"),
    "Config(update_threads=10**6)": (ConfigError, "1000000 is more than", "give the processors"),
    "Config(micro_batch='auto')": (ConfigError, "micro_batch='auto'", "positive number of samples"),
    "Config(max_grad_norm=0)": (ConfigError, "max_grad_norm=0", "positive number, or None for no"),
    "Config(max_grad_norm='1')": (ConfigError, "max_grad_norm='1'", "positive number, or None"),
    "Config(speculate=1)": (ConfigError, "speculate=1", "must be True or False"),
    "Config(checksums='yes')": (ConfigError, "checksums='yes'", "True, False or 'sampled'"),
    "Config(tied={'a': 'b'})": (ConfigError, "tied=.'a': 'b'.", "a list of pairs of parameter"),
    "Config(trace=True)": (ConfigError, "trace=True", "must be the path of a file, or None"),
    "Config(expects_optimizer='AdamW')": (ConfigError, "='AdamW'", "must be a table"),
    "Config(expects_optimizer={'lr': 1})": (ConfigError, "names no class", "give type='AdamW'"),
    "Config.make(Config)": (ConfigError, "config is a type", FORMS),
    "Config.make('list.json')": (ConfigError, "holds a list", "Give names and values, as"),
    # --- Config.from_deepspeed ---
    "stage(4)": (ConfigError, "stage=4", "is not 0, 1, 2 or 3"),
    "stage(3, offload_param={'device': 'disk'})": (ConfigError, "'disk'", "'cpu', 'nvme', 'none'"),
    "deepspeed(optimizer={'type': 'Lamb'})": (ConfigError, "'Lamb'", "AdamW, .*. Leave it out"),
    "deepspeed(zero_optimisation={})": (ConfigError, "sation is unknown", "mean zero_optimization"),
    "deepspeed(gradient_clipping='auto')": (ConfigError, "clipping='auto'", "Give the number, or"),
    # --- unwrap_model, and what comes after ---
    "infinity.unwrap_model(s.plain)": (UsageError, "is not wrapped", FIRST),
    "infinity.unwrap_model(s.model[0])": (UsageError, "Linear is not wrapped", FIRST),
    "s.unwrap(); infinity.unwrap_model(s.model)": (UsageError, "is not wrapped", FIRST),
    "infinity.unwrap_model(s.model, s.adamw)": (UsageError, "this optimizer is not", ITS_OWN),
    "s.unwrap(); s.optimizer.step()": (UsageError, "the model was unwrapped", RETURNED),
    "s.unwrap(); s.optimizer.zero_grad()": (UsageError, "the model was unwrapped", RETURNED),
    "s.unwrap(); s.optimizer.state_dict()": (UsageError, "the model was unwrapped", RETURNED),
    "s.unwrap(); infinity.stats(s.model)": (UsageError, "is not wrapped", FIRST),
    # --- the wrapped model as a plain one ---
    "s.backward(); s.given.step()": (
        UsageError,
        "is not the optimizer that",
        "Call step.. of that",
    ),
    "s.backward(); adamw(s.model).step()": (UsageError, "not the optimizer", "step that optimizer"),
    "s.model.half()": (UsageError, "half on parameter 0.weight", BEFORE),
    "s.model.to('meta')": (UsageError, "to on parameter 0.weight", BEFORE),
    "s.model.share_memory()": (UsageError, "share_memory_ on parameter 0.weight", BEFORE),
    "copy.deepcopy(s.model)": (UsageError, "cannot be pickled, copied", "Save model.state_dict"),
    "pickle.dumps(s.model)": (UsageError, "cannot be pickled", "or infinity.save_checkpoint"),
    "torch.save(s.model, io.BytesIO())": (UsageError, "cannot be pickled", "Save model.state_dict"),
    "copy.deepcopy(s.optimizer)": (UsageError, "cannot be deep-copied", "Use model.state_dict"),
    "s.weight.detach().numpy()": (UsageError, "numpy on parameter 0.weight", FULL),
    "s.weight.data_ptr()": (UsageError, "data_ptr on parameter 0.weight", FULL),
    "s.weight.resize_(3, 3)": (UsageError, "would change the form of parameter 0.weight", AGAIN),
    "s.weight.data = torch.ones(3)": (UsageError, "would not reach its home", "Use `with infinity"),
    "s.model.load_state_dict(plain().state_dict(), assign=True)": (
        UsageError,
        "would replace managed parameters",
        "load without assign",
    ),
    "torch.optim.swa_utils.AveragedModel(s.model)": (
        UsageError,
        "is wrapped: its weights are at home",
        "infinity.ema.model, decay. or infinity.swa",
    ),
    "torch.jit.script(s.model)": (UsageError, "cannot be traced or scripted", AGAIN),
    # --- save_checkpoint, load_checkpoint, save_pretrained ---
    "infinity.save_checkpoint('c', s.plain)": (UsageError, "is not wrapped", FIRST),
    "infinity.save_checkpoint('c', s.model, s.adamw)": (UsageError, "optimizer is not", ITS_OWN),
    "s.backward(); s.save()": (UsageError, "4 parameters .* would be lost", "Save after step"),
    "s.save(extra={'best': plain()})": (UsageError, "extra.best is a Sequential", HOLDS),
    "s.save(extra=lambda step: 1.0)": (UsageError, "extra is a function", HOLDS),
    "s.save(extra={1, 2})": (UsageError, "extra is a set", HOLDS),
    "infinity.load_checkpoint('c', s.plain)": (UsageError, "is not wrapped", FIRST),
    "s.load('notes.txt')": (UsageError, "notes.txt is a file", "not a checkpoint's folder"),
    "s.load('trainer')": (UsageError, "it is the Trainer's", "resume it with resume_from_checkpoi"),
    "s.load('dcp')": (UsageError, "torch.distributed.checkpoint's", "`infinity export` takes its"),
    "s.load('deepspeed')": (UsageError, "it is DeepSpeed's", "`infinity export` takes its weights"),
    "s.load('hub')": (UsageError, "a model's weights alone", "load them with from_pretrained"),
    "infinity.save_pretrained(s.plain, 'p')": (UsageError, "is not wrapped", FIRST),
    "infinity.save_pretrained(s.model, 'p', max_shard_size='5 gigs')": (
        ConfigError,
        "max_shard_size='5 gigs' is not a size",
        SIZE,
    ),
    # --- stats, park, Watch ---
    "infinity.stats(s.plain)": (UsageError, "is not wrapped", FIRST),
    "infinity.park(s.plain)": (UsageError, "is not wrapped", FIRST),
    "infinity.park(s.model, to='cpu')": (ConfigError, "to='cpu'", "to is 'nvme' or 'host'"),
    "infinity.park(s.model, what='grads')": (ConfigError, "what='grads'", "of 'all', 'weights', '"),
    "infinity.park(s.model, 'nowhere')": (ConfigError, "there is no folder", "Create it, or name"),
    "infinity.park(s.model, to='host')": (UsageError, "would free nothing", "Park to a disk"),
    "s.backward(); infinity.park(s.model, 'nvme')": (UsageError, "4 gradients", "Park after step"),
    "infinity.resume(s.plain)": (UsageError, "is not wrapped", FIRST),
    "infinity.Watch(s.plain)": (UsageError, "is not wrapped", FIRST),
    "infinity.Watch(s.model[0])": (UsageError, "Linear is not wrapped", FIRST),
    # --- full_params, named_weights, accumulate, clipping ---
    "inside(infinity.full_params(s.plain))": (UsageError, "is not wrapped", FIRST),
    "inside(infinity.full_params(s.model, '0.wieght'))": (UsageError, "'0.wieght'", "'0.weight'"),
    "full = infinity.full_params(s.model); inside(full)['0.weight'].data.zero_(); close()": (
        UsageError,
        "0.weight was edited without writeback",
        "Use `with infinity.full_params.model, names, writeback=True",
    ),
    "list(infinity.named_weights(s.plain))": (UsageError, "is not wrapped", FIRST),
    "inside(infinity.accumulate(s.plain))": (UsageError, "is not wrapped", FIRST),
    "inside(infinity.accumulate(s.model)); inside(infinity.accumulate(s.model))": (
        UsageError,
        "infinity.accumulate inside another one",
        "Leave the inner block out",
    ),
    "inside(infinity.accumulate(s.model)); s.backward(); s.optimizer.step()": (
        UsageError,
        "optimizer.step.. is not available here: gradients .* are incomplete",
        "step and zero gradients after it",
    ),
    "infinity.clip_grad_norm_(s.model, 1.0)": (UsageError, "not a Sequential", CLIP),
    "infinity.clip_grad_norm_(s.model.parameters(), 1.0)": (UsageError, "not a generator", CLIP),
    "infinity.clip_grad_norm_(s.adamw, 1.0)": (UsageError, "takes the optimizer that wrap", CLIP),
    "m, o = s.wrap(s.adamw, HOST | {'max_grad_norm': 1.0}); inside(o.step_in_backward())": (
        UsageError,
        "max_grad_norm needs the norm of all gradients",
        "Leave out one of the two",
    ),
    # --- averages ---
    "infinity.ema(s.plain, 0.9)": (UsageError, "is not wrapped", FIRST),
    "infinity.ema(s.model, 99)": (ConfigError, "decay=99", DECAY),
    "infinity.ema(s.model, -0.1)": (ConfigError, "decay=-0.1", DECAY),
    "infinity.ema(s.model, float('nan'))": (ConfigError, "decay=nan", DECAY),
    "infinity.ema(s.model, 0.9); infinity.swa(s.model)": (UsageError, "already", "its remove.. f"),
    "average = infinity.swa(s.model); inside(average.applied())": (
        UsageError,
        "there is no average yet",
        "call update.. after a step",
    ),
    "average = s.average(); inside(average.applied()); inside(average.applied())": (
        UsageError,
        "not available inside `with average.applied",
        "Call it after that block",
    ),
    # --- integrations, parallel ---
    "integrations.merge_adapters(s.plain)": (UsageError, "is not wrapped", FIRST),
    "integrations.merge_adapters(s.model)": (UsageError, "no adapters", "that peft.get_peft_model"),
    "integrations.save_merged(s.model, 'm')": (UsageError, "Sequential", "give a PEFT model of a"),
    "integrations.InfinityTrainer(s.plain, infinity=3)": (ConfigError, "config is a int", FORMS),
    "trainer(bf16_full_eval=True)": (
        ConfigError,
        "bf16_full_eval casts the model after it is wrapped",
        "leave it out, and give Config.param_dtype",
    ),
    "integrations.InfinityAccelerator(cpu=True, infinity={'parms': 'host'})": (
        ConfigError,
        "unknown config key 'parms'",
        "did you mean 'params'",
    ),
    "prepare = accelerator().prepare; prepare(nn.Linear(8, 8)); prepare(s.adamw)": (
        ConfigError,
        "was prepared without its model",
        "accelerator.prepare.model, optimizer, ....* in one call",
    ),
    "integrations.InfinityStrategy(3)": (ConfigError, "config is a int", FORMS),
    "parallel.tensor_parallel(s.plain, 'tp')": (
        ConfigError,
        "not 'tp'",
        "axis of a mesh .mesh.'tp",
    ),
    "parallel.expert_parallel(s.plain, None)": (
        ConfigError,
        "not None",
        "axis of a mesh .mesh.'ep",
    ),
    "parallel.find_plan(s.plain)": (
        ConfigError,
        "no repeated blocks",
        "give tensor_parallel a plan",
    ),
    # --- what a first table of them was answered poorly ---
    "s.model[0].weight = nn.Parameter(ROWS)": (
        UsageError,
        "0.weight .* cannot be replaced by another parameter",
        "unwrap_model",
    ),
    "s.model[0] = nn.Linear(8, 8)": (
        UsageError,
        "0.weight .* cannot be replaced with its module",
        "unwrap_model",
    ),
    "infinity.park(s.model, what=['weights'])": (
        ConfigError,
        "what=.'weights'.",
        "one of 'all', 'weights', 'optimizer'",
    ),
    "infinity.Watch(s.model, steps='ten')": (
        ConfigError,
        "steps='ten'",
        "give the number of steps, or None",
    ),
    "watch = inside(infinity.Watch(s.model, folder='w')); watch.update(loss='low')": (
        UsageError,
        "loss is a str",
        "give a number",
    ),
    "watch = inside(infinity.Watch(s.model, folder='w')); watch.update(tokens=-1)": (
        UsageError,
        "tokens=-1",
        "give the number of a step's tokens",
    ),
    "inside(infinity.Watch(s.model, steps=-1, folder='w'))": (
        ConfigError,
        "steps=-1",
        "give the number of steps, or None",
    ),
    "inside(infinity.Watch(s.model, folder='notes.txt'))": (
        StorageError,
        "notes.txt is a file",
        "give the path of a folder",
    ),
    "inside(infinity.full_params(s.model, s.weight))": (
        UsageError,
        "not a StoredParameter",
        "takes names of parameters or modules, as",
    ),
    "inside(infinity.full_params(s.model, 0))": (
        UsageError,
        "not a int",
        "takes names of parameters or modules, as",
    ),
    "infinity.ema(s.model, '0.9')": (ConfigError, "decay='0.9'", "give a number from 0 to 1"),
    "infinity.ema(0.9, s.model)": (ConfigError, "decay is a Sequential", "as ema.model, 0.999"),
    "infinity.ema(s.model, True)": (ConfigError, "decay=True", "give a number from 0 to 1"),
    "s.adamw.param_groups[0]['lr'] = float('nan'); s.wrap(s.adamw)": (
        ConfigError,
        "group 0 has lr=nan",
        "set it to a number",
    ),
    "s.adamw.param_groups[0]['lr'] = '1e-3'; s.wrap(s.adamw)": (
        ConfigError,
        "group 0 has lr='1e-3'",
        "set it to a number",
    ),
    "Config(max_grad_norm=float('inf'))": (
        ConfigError,
        "max_grad_norm=inf",
        "must be a positive number, or None",
    ),
    "s.wrap(None, DISK | {'nvme_paths': ''})": (ConfigError, "nvme_paths=''", "a path is empty"),
    "infinity.save_checkpoint('', s.model)": (
        ConfigError,
        "path is empty",
        "give the path of a folder",
    ),
    "infinity.save_checkpoint('s3://bucket/c', s.model)": (
        ConfigError,
        "s3://bucket/c is not on this machine",
        "give a folder, and copy it there",
    ),
    "infinity.save_checkpoint('notes.txt', s.model)": (
        StorageError,
        "notes.txt is a file",
        "give the path of a folder",
    ),
    "infinity.save_checkpoint(s.model, 'c', s.optimizer)": (
        ConfigError,
        "path is a Sequential",
        "give the path of a folder",
    ),
    "infinity.load_checkpoint(s.model, 'c', s.optimizer)": (
        ConfigError,
        "path is a Sequential",
        "give the path of a folder",
    ),
    "infinity.save_pretrained(s.model, 'notes.txt')": (
        StorageError,
        "notes.txt is a file",
        "give the path of a folder",
    ),
    "infinity.save_pretrained('p', s.model)": (
        UsageError,
        "this str is not wrapped",
        "take it first",
    ),
    "infinity.unwrap_model(s.optimizer, s.model)": (
        UsageError,
        "this InfinityOptimizer is not wrapped",
        "take it first",
    ),
    "s.save(overwrite='no')": (ConfigError, "overwrite='no'", "must be True or False"),
    "infinity.park(s.model, '')": (ConfigError, "folder is empty", "give the path of a folder"),
    "infinity.wrap_model('gpt2')": (ConfigError, "model is a str", "from_pretrained"),
    "infinity.wrap_model(s.adamw, s.plain)": (
        ConfigError,
        "model is a AdamW",
        "the model comes first",
    ),
}
PLAIN: dict[str, tuple[type[Exception], str]] = {  # what Python or torch refuses themselves
    "infinity.wrap_model()": (TypeError, "'model'"),
    "infinity.wrap_model(s.plain, device='cpu')": (TypeError, "argument 'device'"),
    "Config('host')": (TypeError, "takes 1 positional argument"),
    "Config(lr=1)": (TypeError, "argument 'lr'"),
    "Config().params = 'host'": (AttributeError, "cannot assign to field 'params'"),
    "Config.from_deepspeed(3)": (TypeError, "os.PathLike object"),
    "infinity.load_checkpoint('c')": (TypeError, "'model'"),
    "infinity.load_checkpoint('c', s.model, strict=False)": (TypeError, "argument 'strict'"),
    "infinity.save_pretrained(s.model, 'p', safe_serialization=False)": (TypeError, "'safe_serial"),
    "infinity.full_params(s.model)['0.weight']": (TypeError, "not subscriptable"),
    "infinity.accumulate(s.model, 4)": (TypeError, "1 positional argument"),
    "infinity.clip_grad_norm_(s.optimizer)": (TypeError, "'max_norm'"),
    "infinity.ema(s.model)": (TypeError, "'decay'"),
    "infinity.Watch(s.model, 10)": (TypeError, "2 positional arguments"),
    "s.optimizer.add_param_group({'params': s.weight})": (ValueError, "more than one parameter gr"),
}


def plain(count: int = 2, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def deepspeed(**keys: Any) -> Config:
    return Config.from_deepspeed(keys)


def stage(number: int, **keys: Any) -> Config:
    return deepspeed(zero_optimization={"stage": number, **keys})


def accelerator() -> Any:
    return integrations.InfinityAccelerator(cpu=True, infinity=HOST)


def trainer(**options: Any) -> Any:
    import transformers

    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
    args = transformers.TrainingArguments("out", use_cpu=True, report_to=[], **options)
    return integrations.InfinityTrainer(
        transformers.LlamaForCausalLM(config),
        args,
        train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}] * 2,
        infinity=HOST,
    )


class Scene:
    """``plain`` with ``adamw``; ``model`` with ``optimizer``, wrapped, and the optimizer that was
    ``given``; ``folder``, the current one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.set = folder, monkeypatch.setenv
        self.plain = plain()
        self.adamw, self.given = adamw(self.plain), adamw(model := plain())
        self.model, self.optimizer = infinity.wrap_model(model, self.given, HOST)

    @property
    def weight(self) -> nn.Parameter:
        return self.model[0].weight

    def wrap(self, optimizer: Any = None, config: Any = HOST, **more: Any) -> Any:
        """Wraps the plain model."""
        return infinity.wrap_model(self.plain, optimizer, config, **more)

    def unwrap(self) -> None:
        infinity.unwrap_model(self.model, self.optimizer)

    def backward(self) -> None:
        self.model(ROWS).sum().backward()

    def average(self) -> Any:
        average = infinity.ema(self.model, 0.9)
        average.update()
        return average

    def save(self, **more: Any) -> None:
        infinity.save_checkpoint("c", self.model, self.optimizer, **more)

    def load(self, path: str) -> Any:
        return infinity.load_checkpoint(path, self.model, self.optimizer)

    def state(self) -> dict[str, Any]:
        """All that a wrong use could change."""
        values = {
            f"{which} {name}": value.detach().clone()
            for which, model in (("plain", self.plain), ("wrapped", self.model))
            for name, value in model.state_dict().items()
        }
        return values | {
            "classes": [type(param) for param in self.plain.parameters()],
            "hooks": [len(module._forward_pre_hooks) for module in self.plain.modules()],
            "groups": [{**group, "params": None} for group in self.adamw.param_groups],
            "files": sorted(map(str, self.folder.rglob("*"))),
        }


@pytest.fixture
def scene(tmp_path, monkeypatch) -> Iterator[Scene]:
    """A scene in a process that is no rank of a job."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    scene = Scene(tmp_path, monkeypatch)
    yield scene
    with contextlib.suppress(infinity.InfinityError):
        scene.unwrap()


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(
        torch.equal(value, after[name]) if torch.is_tensor(value) else value == after[name]
        for name, value in before.items()
    )


def answer(scene: Scene, use: str, error: type[Exception]) -> str:
    """What the last statement of a use raises. It changes nothing."""
    *right, wrong = use.split("; ")
    stack = contextlib.ExitStack()
    names = globals() | {"s": scene, "inside": stack.enter_context, "close": stack.close}
    for statement in right:
        exec(statement, names)
    before = scene.state()
    with pytest.raises(error) as caught:
        exec(wrong, names)
    assert same(before, scene.state())
    with contextlib.suppress(infinity.InfinityError):
        stack.close()
    return str(caught.value)


@pytest.mark.parametrize("use", USES)
def test_a_wrong_use_is_a_typed_error_with_cause_and_remedy(use, scene):
    for part, library in NEEDED.items():
        if part in use:
            pytest.importorskip(library)
    for part, folder in FOLDERS.items():
        if part in use and is_deleted(folder):
            pytest.skip(f"{folder} was deleted here")
    error, *patterns = USES[use]
    said = answer(scene, use, error)
    for pattern in patterns:
        assert re.search(pattern, said), f"{pattern!r} is not in {said!r}"
    lines = said.splitlines()  # the first, and code to copy
    assert all(lines) and len(lines) <= 5


@pytest.mark.parametrize("use", PLAIN)
def test_what_python_refuses_changes_nothing(use, scene):
    error, pattern = PLAIN[use]
    assert re.search(pattern, answer(scene, use, error))


def test_there_are_many():
    assert len(USES) >= 45
