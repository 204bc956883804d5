# SPDX-License-Identifier: Apache-2.0
"""Construction, loading and forward order: re-implemented from the prose of the contract (sections 3.2 to 3.5)."""

from __future__ import annotations

import torch
from tensorrt_llm._standin.lazy import M
from tensorrt_llm._standin.paths import ERA
from torch import nn

# ---- building blocks


def MoEExecutionContractMixin__supports_moe_output_in_alltoall_workspace(self):
    return False


def MoEExecutionContractMixin__validate_configurable_moe(self, moe):
    return None


def MoEWeightOwnerMixin__create_weights(self):
    if self._weights_created:
        return
    self.quant_method = self._get_quant_method()
    self.quant_method.create_weights(self)
    self._weights_created = True
    self._check_configs()


def MoEWeightOwnerMixin___check_configs(self):
    assert self._weights_created


def MoEWeightOwnerMixin__load_weights(self, weights, allow_partial_loading=False):
    assert self._weights_created
    assert len(weights) == 1
    keywords = {"allow_partial_loading": True} if allow_partial_loading else {}
    self.quant_method.load_weights(self, weights[0], self.weight_loading_mode, **keywords)


def MoEWeightOwnerMixin__transform_weights(self):
    self.quant_method.transform_weights(self)


def MoEWeightOwnerMixin__cache_derived_state(self):
    self.quant_method.cache_derived_state(self)


def MoEWeightOwnerMixin__post_load_weights(self):
    self.transform_weights()
    self.cache_derived_state()


def MoEWeightOwnerMixin__process_weights_after_loading(self):
    self.quant_method.process_weights_after_loading(self)


def MoEWeightOwnerMixin__pre_reload_weights(self):
    if self._using_load_balancer():
        raise NotImplementedError("weight reloading is not compatible with EPLB")
    self.quant_method.pre_reload_weights(self)


def MoEWeightOwnerMixin__has_nvfp4(self):
    assert self._weights_created
    return self.quant_config.quant_algo is not None and self.quant_config.quant_algo.value == "NVFP4"


def MoEWeightOwnerMixin__has_nvfp4_activation_quantization(self):
    assert self._weights_created
    return bool(self.quant_method.quantizes_nvfp4_activations)


def MoEEplbWeightLayoutMixin___supports_load_balancer(self):
    return False


def MoEEplbWeightLayoutMixin___using_load_balancer(self):
    return self.layer_load_balancer is not None


def MoEEplbWeightLayoutMixin___using_dynamic_load_balancer(self):
    return self.layer_load_balancer is not None and self.layer_load_balancer.is_dynamic_routing()


def MoEEplbWeightLayoutMixin__register_parameter_weight_slot_fn(self, weight_name, local_slot_id):
    slot = getattr(self, weight_name).data[local_slot_id]
    self.layer_load_balancer.register_weight_slot(local_slot_id, weight_name, slot)


def MoEEplbWeightLayoutMixin__register_to_fix_weight_fn(self, weight_name):
    parameter = getattr(self, weight_name)
    tensor = parameter.detach()
    assert tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().size(), weight_name
    self.layer_load_balancer.make_tensor_host_accessible(tensor)
    parameter.data = tensor


def MoEEplbWeightLayoutMixin__register_all_parameter_slot_and_to_fix_weight_fns(self, weight_and_tensor_dict):
    balancer = self.layer_load_balancer
    if not balancer.is_dynamic_routing():
        return
    for slot in range(len(self.initial_local_expert_ids)):
        for name in weight_and_tensor_dict:
            balancer.add_register_weight_fn(self.register_parameter_weight_slot_fn, (name, slot))
    for name in weight_and_tensor_dict:
        balancer.add_to_migrate_weight_fn(self.register_to_fix_weight_fn, (name,))
    share, sharer = balancer.get_load_expert_ids(), balancer.host_tensor_sharer
    for expert in range(self.num_experts):
        for name, tensor in weight_and_tensor_dict.items():
            if expert in share:
                sharer.share_host_tensor_with_shape(expert, name, tensor[share.index(expert)])
            else:
                sharer.pre_register_host_tensor_with_shape(expert, name, tensor.dtype, tensor[0].shape)


# ---- construction state


def _compute_ep_partition(num_experts, ep_size, ep_rank):
    floor, rest = divmod(num_experts, ep_size)
    start = ep_rank * floor + min(ep_rank, rest)
    return start, start + floor + (1 if ep_rank < rest else 0)


def _apply_state(module, values):
    config = values["model_config"]
    mapping = config.mapping
    names = ["routing_method", "num_experts", "hidden_size", "intermediate_size", "weight_loading_mode", "bias",
             "dtype", "reduce_results", "layer_idx", "aux_stream_dict"]  # fmt: skip
    if ERA != "D2":
        names += ["swiglu_alpha", "swiglu_beta", "swiglu_limit", "swiglu_limit_scalar", "activation_type"]
    for name in names:
        setattr(module, name, values.get(name))
    module.layer_idx_str = str(values.get("layer_idx"))
    module.quant_config = config.quant_config
    module.mapping = mapping
    module.moe_backend = config.moe_backend
    module.use_dp = mapping.enable_attention_dp
    module.tp_size, module.ep_size = mapping.moe_tp_size, mapping.moe_ep_size
    module.ep_rank, module.tp_rank = mapping.moe_ep_rank, mapping.moe_tp_rank
    module.cluster_size, module.cluster_rank = mapping.moe_cluster_size, 0
    module.parallel_size, module.parallel_rank = mapping.tp_size, mapping.tp_rank
    module.rank = mapping.rank
    module.intermediate_size_per_partition = module.intermediate_size // module.tp_size
    module.layer_load_balancer = None
    module.repeat_idx, module.repeat_count = 0, 1
    module.num_slots = module.num_experts
    module.slot_start, module.slot_end = _compute_ep_partition(module.num_slots, module.ep_size, module.ep_rank)
    module.expert_size_per_partition = module.slot_end - module.slot_start
    module.initial_global_assignments = list(range(module.num_slots))
    module.initial_local_expert_ids = module.initial_global_assignments[module.slot_start : module.slot_end]


def MoEImplBase____init__(self, *, eplb=None):
    nn.Module.__init__(self)
    self.standin_eplb = eplb


def MoEImplBase__get_workspaces(self, *args, **kwargs):
    return None


def apply_moe_impl_construction_state(module, **values):
    if values.pop("init_load_balancer", False):
        raise TypeError("init_load_balancer=True: the wrapper owns EPLB")
    _apply_state(module, values)
    if ERA == "D2":
        module.activation = values["activation"]
        M.activation.install_activation_params(module)


def MoE____init__(self, **values):
    nn.Module.__init__(self)
    values.pop("init_load_balancer")
    _apply_state(self, values)


def MoE__forward(self, x, router_logits, do_finalize=True, output_dtype=None, all_rank_num_tokens=None,
                 use_dp_padding=None, **kwargs):  # fmt: skip
    return self.forward_impl(
        x,
        router_logits,
        do_finalize=do_finalize,
        output_dtype=output_dtype,
        all_rank_num_tokens=all_rank_num_tokens,
        use_dp_padding=use_dp_padding,
        **kwargs,
    )


def TrtllmCutedslMegaMoeNvfp4Impl__can_implement(cls, p, d):
    contract = M.impl_contract
    return contract.MoEEligibility.no(contract.MoERejectReason.DEP_MISSING, "upstream's own kernel is not here")


# ---- the wrapper

_SYNC_ATTRS = (
    "layer_idx", "layer_idx_str", "num_slots", "layer_load_balancer", "repeat_count", "repeat_idx",
    "initial_local_expert_ids", "initial_global_assignments", "slot_start", "slot_end", "expert_size_per_partition",
)  # fmt: skip


def ConfigurableMoE__can_implement(cls, p, d):
    contract = M.impl_contract
    return contract.MoEEligibility.no(contract.MoERejectReason.NOT_AN_IMPL, "a wrapper")


def ConfigurableMoE____init__(self, *, routing_method, num_experts, hidden_size, intermediate_size, **values):
    model_config = values.pop("model_config")
    override = values.pop("override_quant_config")
    moe_cls = values.pop("moe_cls")
    layer_idx = values.pop("layer_idx")
    state = {
        "routing_method": routing_method,
        "num_experts": num_experts,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "dtype": values.get("dtype"),
        "reduce_results": values.get("reduce_results"),
        "model_config": model_config,
        "layer_idx": layer_idx,
    }
    nn.Module.__init__(self)
    _apply_state(self, state)
    balancer, placement = M.moe_load_balancer.get_moe_load_balancer(), model_config.moe_load_balancer
    if balancer is not None:
        if placement.num_slots % self.ep_size:
            raise ValueError(f"num_slots {placement.num_slots} must be divisible by ep_size {self.ep_size}")
        local = self.expert_size_per_partition = placement.num_slots // self.ep_size
        self.layer_load_balancer = balancer.add_layer(num_experts, routing_method.top_k, local)
        self.num_slots = placement.num_slots
        self.initial_global_assignments = placement.get_layer_initial_global_assignments(layer_idx) or [
            (rank * num_experts // self.ep_size + slot) % num_experts
            for rank in range(self.ep_size)
            for slot in range(local)
        ]
        assert set(self.initial_global_assignments) == set(range(num_experts))
        self.layer_load_balancer.set_initial_weight_assignments(self.initial_global_assignments)
        self.slot_start, self.slot_end = self.ep_rank * local, (self.ep_rank + 1) * local
        self.initial_local_expert_ids = self.initial_global_assignments[self.slot_start : self.slot_end]
    self.apply_router_weight_on_input = values.get("apply_router_weight_on_input", False)
    self.moe_cls = moe_cls
    # how each era hands the activation to the backend: loose values, or one carrier
    keep = ("aux_stream_dict", "weight_loading_mode", "dtype", "reduce_results", "apply_router_weight_on_input",
            "swiglu_alpha", "swiglu_beta", "swiglu_limit", "swiglu_limit_scalar", "activation_type", "activation",
            "bias")  # fmt: skip
    passed = {n: v for n, v in values.items() if n in keep and (n != "activation" or v is not None)}
    self._create_and_sync_backend(
        model_config=model_config,
        routing_method=routing_method,
        override_quant_config=override,
        moe_cls=moe_cls,
        **passed,
    )
    supports = moe_cls.capabilities.supports_eplb if hasattr(moe_cls.capabilities, "supports_eplb") else True
    assert self.layer_load_balancer is None or (supports and self.backend._supports_load_balancer())
    self.comm = None if moe_cls.scheduler_kind is M.interface.MoESchedulerKind.FUSED_COMM else object()
    self.moe_max_num_tokens = model_config.moe_max_num_tokens or model_config.max_num_tokens
    self.backend.validate_configurable_moe(self)
    self.scheduler = M.moe_scheduler.FusedCommMoEScheduler(self) if self.comm is None else None
    self._transformed = False


def ConfigurableMoE___temporarily_skip_weight_creation(model_config):
    import contextlib

    @contextlib.contextmanager
    def toggled():
        before = model_config.skip_create_weights_in_init
        model_config.set_unfrozen("skip_create_weights_in_init", True)
        try:
            yield
        finally:
            model_config.set_unfrozen("skip_create_weights_in_init", before)

    return toggled()


def ConfigurableMoE___create_and_sync_backend(
    self, *, model_config, routing_method, override_quant_config, moe_cls, **values
):
    import inspect

    from_create = M.create_moe  # looked up at call time
    for name in [n for n, v in values.items() if v is None]:
        values.pop(name)
    accepted = inspect.signature(from_create.create_moe_backend).parameters
    with self._temporarily_skip_weight_creation(model_config):
        self.backend = from_create.create_moe_backend(
            moe_cls=moe_cls,
            routing_method=routing_method,
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            model_config=model_config,
            layer_idx=None,
            init_load_balancer=False,
            **{n: v for n, v in values.items() if n in accepted},
        )
    for name in _SYNC_ATTRS:
        setattr(self.backend, name, getattr(self, name))
    if ERA == "D2" and hasattr(self.backend, "activation"):
        M.activation.install_activation_params(self.backend)
    if override_quant_config is not None:
        self.quant_config = self.backend.quant_config = override_quant_config
    if not (model_config.skip_create_weights_in_init or model_config.quant_config_dict):
        self.backend.create_weights()


def ConfigurableMoE__create_weights(self):
    self.backend.create_weights()


def ConfigurableMoE__load_weights(self, weights, allow_partial_loading=False):
    self.backend.load_weights(weights, allow_partial_loading=allow_partial_loading)


def ConfigurableMoE__process_weights_after_loading(self):
    self.backend.process_weights_after_loading()


def ConfigurableMoE__transform_weights(self):
    if not self._transformed:
        self.backend.transform_weights()
        self._transformed = True


def ConfigurableMoE__cache_derived_state(self):
    self.backend.cache_derived_state()


def ConfigurableMoE__post_load_weights(self):
    self.transform_weights()
    self.cache_derived_state()


def ConfigurableMoE__pre_reload_weights(self):
    self._transformed = False
    self.backend.pre_reload_weights()


def ConfigurableMoE__forward_impl(self, x, router_logits, *, do_finalize=True, output_dtype=None,
                                  all_rank_num_tokens=None, use_dp_padding=None, **kwargs):  # fmt: skip
    out = self.scheduler.forward(
        x,
        router_logits,
        do_finalize=do_finalize,
        output_dtype=output_dtype,
        all_rank_num_tokens=all_rank_num_tokens,
        use_dp_padding=use_dp_padding,
        input_ids=kwargs.get("input_ids"),
        lora_params=kwargs.get("lora_params"),
    )
    self.repeat_idx = (self.repeat_idx + 1) % self.repeat_count
    return out


# ---- the scheduler of fused-communication backends


def FusedCommMoEScheduler__forward(self, x, router_logits, *, do_finalize, output_dtype, all_rank_num_tokens,
                                   use_dp_padding, input_ids, lora_params=None):  # fmt: skip
    if lora_params is not None:
        raise NotImplementedError("LoRA")
    if not do_finalize or self.moe.apply_router_weight_on_input:
        raise NotImplementedError("do_finalize must be true, apply_router_weight_on_input false")
    x, logits, input_ids, counts, ep_rank, had_meta = self._strip_adp_padding(
        x, router_logits, input_ids, all_rank_num_tokens
    )
    num_chunks, x_chunks, logit_chunks, sizes = self._compute_chunk_layout(x, logits, counts, ep_rank)
    outputs = self._run_chunks(
        x_chunks,
        logit_chunks,
        [None] * num_chunks,
        num_chunks=num_chunks,
        x_real=x,
        rl_real=logits,
        all_rank_chunk_size_list=sizes,
        had_meta=had_meta,
        output_dtype=output_dtype,
        do_finalize=do_finalize,
    )
    return torch.cat(outputs)


def FusedCommMoEScheduler___strip_adp_padding(self, x, router_logits, input_ids, all_rank_num_tokens):
    ep_rank = self.moe.mapping.moe_ep_rank
    if all_rank_num_tokens is None:
        return x, router_logits, input_ids, [x.shape[0]] * self.moe.ep_size, ep_rank, False
    live = all_rank_num_tokens[ep_rank]
    return x[:live], router_logits[:live], input_ids, list(all_rank_num_tokens), ep_rank, True


def _near_even(count, num_chunks):
    floor, rest = divmod(count, num_chunks)
    return [floor + (1 if index < rest else 0) for index in range(num_chunks)]


def FusedCommMoEScheduler___compute_chunk_layout(self, x_real, rl_real, real_all_rank_num_tokens, ep_rank):
    limit = self.moe.moe_max_num_tokens
    num_chunks = max(1, -(-max(real_all_rank_num_tokens) // limit))
    per_rank = [_near_even(count, num_chunks) for count in real_all_rank_num_tokens]
    own = per_rank[ep_rank]
    sizes = [[per_rank[rank][chunk] for rank in range(len(per_rank))] for chunk in range(num_chunks)]
    return num_chunks, list(x_real.split(own)), list(rl_real.split(own)), sizes


def FusedCommMoEScheduler___run_chunks(self, x_chunks, rl_chunks, input_ids_chunks, *, num_chunks,
                                       all_rank_chunk_size_list, had_meta, output_dtype, do_finalize, **_):  # fmt: skip
    return [
        self._forward_chunk(
            x_chunks[index],
            rl_chunks[index],
            output_dtype=output_dtype,
            all_rank_num_tokens=all_rank_chunk_size_list[index] if had_meta else None,
            do_finalize=do_finalize,
            is_first_call=index == 0,
            is_last_call=index == num_chunks - 1,
        )
        for index in range(num_chunks)
    ]


def FusedCommMoEScheduler___forward_chunk(self, x, router_logits, *, output_dtype, all_rank_num_tokens, do_finalize,
                                          is_first_call=True, is_last_call=True, input_ids=None):  # fmt: skip
    moe, backend = self.moe, self.moe.backend
    balancer = moe.layer_load_balancer
    if balancer is not None and balancer.is_dynamic_routing() and is_first_call:
        balancer.start_wait_gpu_stage()
        balancer.done_wait_gpu_stage()
    experts, scales = moe.routing_method.apply(router_logits, input_ids)
    experts, scales = experts.to(torch.int32), scales.to(torch.float32)
    if balancer is not None:
        experts = balancer.route(experts, moe.use_dp)
    if getattr(backend, "supports_fused_prepare", lambda: False)():
        quantised, x_sf = x, None
    else:
        quantised, x_sf = backend.quantize_input(x)
    if hasattr(backend, "set_adaptive_launch_tokens"):
        backend.set_adaptive_launch_tokens(max(all_rank_num_tokens) or None if all_rank_num_tokens else None)
    out = backend.run_moe(
        M.impl_contract.MoERunContext(
            token_selected_experts=experts,
            token_final_scales=scales,
            x=quantised,
            x_sf=x_sf,
            output_dtype=output_dtype,
        )
    )
    assert out.shape == x.shape and out.dtype == x.dtype
    if balancer is not None and balancer.is_dynamic_routing() and is_last_call:
        balancer.start_set_cpu_stage()
        balancer.done_set_cpu_stage()
    return out
