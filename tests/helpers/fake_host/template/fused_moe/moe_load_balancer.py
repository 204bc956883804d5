# SPDX-License-Identifier: Apache-2.0
"""Expert load balancing: slots, host copies of all experts, and weights that change places between iterations.

Real: host copies lie in shared memory, and native threads copy them into slots. Here ranks exchange them by MPI and
`end_iter` copies. As in the real one, tensors that become host-accessible move to other memory; the old memory is
poisoned, so that whoever still reads it is wrong.
"""

from __future__ import annotations

import threading

import torch


class HostMoeTensorSharer:
    def __init__(self, expert_count, comm):
        rank, size = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
        self.comm = comm
        self.expert_count = expert_count
        self.expert_start, self.expert_end = rank * expert_count // size, (rank + 1) * expert_count // size
        self.name_info = {}
        self.shared_tensors = {}
        self.host_weights = {}

    def _note(self, name, dtype, shape):
        assert len(shape) <= 2, f"{name} has {len(shape)} dimensions"
        assert self.name_info.setdefault(name, (dtype, shape)) == (dtype, shape), name

    def pre_register_host_tensor_with_shape(self, expert_id, name, dtype, tensor_shape):
        assert not self.expert_start <= expert_id < self.expert_end
        self._note(name, dtype, tensor_shape)

    def share_host_tensor_with_shape(self, expert_id, name, t):
        assert t.is_contiguous() and t.device.type == "cpu"
        assert (expert_id, name) not in self.shared_tensors, "registered twice"
        assert self.expert_start <= expert_id < self.expert_end
        self._note(name, t.dtype, t.shape)
        self.shared_tensors[expert_id, name] = t

    def finalize_layer_weights(self):
        expected = (self.expert_end - self.expert_start) * len(self.name_info)
        assert len(self.shared_tensors) == expected and not self.host_weights
        self.host_weights = {key: t.clone() for key, t in self.shared_tensors.items()}
        self.shared_tensors = {}

    def finalize_host_tensor_sharing(self, add_host_weight_fn):
        parts = [self.host_weights] if self.comm is None else self.comm.allgather(self.host_weights)
        for part in parts:
            for (expert, name), t in part.items():
                add_host_weight_fn(expert, name, t)


class SingleLayerMoeLoadBalancer:
    def __init__(self, owner, expert_count, slot_count_per_rank):
        self.owner = owner
        self.updates_enabled = owner.layer_updates_per_iter > 0
        self.expert_count = expert_count
        self.slot_start = owner.ep_rank * slot_count_per_rank
        self.host_tensor_sharer = HostMoeTensorSharer(expert_count, owner.comm) if self.updates_enabled else None
        self.register_weight_fns, self.to_migrate_weight_fns = [], []
        self.slots, self.host, self.assignments = {}, {}, None
        self.stage = "idle"

    def is_static_routing(self):
        return not self.updates_enabled

    def is_dynamic_routing(self):
        return self.updates_enabled

    def need_load_shared_weights(self):
        return self.updates_enabled

    def get_repeat_count(self):
        return 1

    def get_load_expert_ids(self):
        assert self.updates_enabled
        return list(range(self.host_tensor_sharer.expert_start, self.host_tensor_sharer.expert_end))

    def add_to_migrate_weight_fn(self, fn, args, kwargs={}):  # noqa: B006
        self.to_migrate_weight_fns.append((fn, args, kwargs))

    def add_register_weight_fn(self, fn, args, kwargs={}):  # noqa: B006
        self.register_weight_fns.append((fn, args, kwargs))

    def make_tensor_host_accessible(self, wt):
        old = wt.flatten().view(torch.uint8)
        moved = old.clone().view(wt.dtype).view(wt.shape)
        old.fill_(0xFF)
        wt.data = moved

    def register_weight_slots_after_to_cuda(self):
        for fns in (self.to_migrate_weight_fns, self.register_weight_fns):
            for fn, args, kwargs in fns:
                fn(*args, **kwargs)
            fns.clear()

    def register_weight_slot(self, local_slot_id, name, t):
        assert t.dim() <= 2, "t.dim() should be less than or equal to 2"
        self.slots[local_slot_id, name] = t

    def set_initial_weight_assignments(self, initial_weight_assignments):
        self.assignments = list(initial_weight_assignments)

    def py_finalize_model(self):
        if self.updates_enabled:
            self.host_tensor_sharer.finalize_host_tensor_sharing(self._add_host_weight_from_tensor)

    def _add_host_weight_from_tensor(self, expert_id, name, t):
        self.host[expert_id, name] = t

    def start_wait_gpu_stage(self):
        assert self.stage == "idle" and self.owner.in_iter, (self.stage, self.owner.in_iter)
        self.stage = "waiting"

    def done_wait_gpu_stage(self):
        assert self.stage == "waiting"
        self.stage = "routing"

    def start_set_cpu_stage(self):
        assert self.stage == "routing"
        self.stage = "setting"

    def done_set_cpu_stage(self):
        assert self.stage == "setting"
        self.stage = "idle"

    def route(self, token_selected_experts, offset_by_ep_rank=False):
        """Replicas take turns."""
        assert self.assignments is not None
        assert self.is_static_routing() or self.stage == "routing"
        slots = [[s for s, expert in enumerate(self.assignments) if expert == e] for e in range(self.expert_count)]
        flat = [
            slots[expert][turn % len(slots[expert])] if 0 <= expert < self.expert_count else -1
            for turn, expert in enumerate(token_selected_experts.flatten().tolist())
        ]
        return torch.tensor(flat, dtype=torch.int32).view(token_selected_experts.shape)

    def update(self):
        """Every slot gets the expert of the slot five further on; replicas stay replicas of something."""
        self.assignments = self.assignments[5:] + self.assignments[:5]
        for (slot, name), t in self.slots.items():
            host = self.host[self.assignments[self.slot_start + slot], name]
            assert (host.dtype, host.nbytes) == (t.dtype, t.nbytes)
            t.copy_(host.view(t.shape))


_active = threading.local()


class MoeLoadBalancer:
    def __init__(self, ep_rank, ep_size, layer_updates_per_iter):
        self.ep_rank, self.layer_updates_per_iter = ep_rank, layer_updates_per_iter
        self.comm = None
        if ep_size > 1:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.single_layer_load_balancers = []
        self.in_iter = False

    def is_static_routing(self):
        return self.layer_updates_per_iter == 0

    def add_layer(self, expert_count, top_k, slot_count_per_rank, aux_stream=None):
        self.single_layer_load_balancers.append(SingleLayerMoeLoadBalancer(self, expert_count, slot_count_per_rank))
        return self.single_layer_load_balancers[-1]

    def register_weight_slots_after_to_cuda(self):
        for layer in self.single_layer_load_balancers:
            layer.register_weight_slots_after_to_cuda()

    def finalize_model(self):
        for layer in self.single_layer_load_balancers:
            layer.py_finalize_model()

    def start_iter(self):
        assert not self.in_iter
        self.in_iter = True

    def end_iter(self):
        assert self.in_iter
        self.in_iter = False
        for layer in self.single_layer_load_balancers:
            layer.update()

    def __enter__(self):
        _active.instance = self
        return self

    def __exit__(self, *_):
        del _active.instance


class MoeLoadBalancerIterContext:
    def __init__(self, moe_load_balancer):
        self.moe_load_balancer = moe_load_balancer

    def _is_dynamic(self):
        return self.moe_load_balancer is not None and not self.moe_load_balancer.is_static_routing()

    def __enter__(self):
        if self._is_dynamic():
            self.moe_load_balancer.start_iter()

    def __exit__(self, *_):
        if self._is_dynamic():
            self.moe_load_balancer.end_iter()


def get_moe_load_balancer():
    return getattr(_active, "instance", None)


def maybe_create_moe_load_balancer(model_config, mapping):
    import contextlib

    placement = model_config.moe_load_balancer
    if placement is None:
        return contextlib.nullcontext()
    placement.setup(ep_rank=mapping.moe_ep_rank, ep_size=mapping.moe_ep_size)
    return MoeLoadBalancer(mapping.moe_ep_rank, mapping.moe_ep_size, placement.layer_updates_per_iter)
