"""Why settings of verl are not carried over: patterns of whole names, in order."""

from jaxrl.migrate.migration import DIFFERS, NONE, UNNEEDED, Reasons

REASONS: Reasons = (
    (r".*\._target_|hydra\..*", UNNEEDED, "of Hydra"),
    (
        r"global_profiler\..*|.*\.profiler\..*|.*\.trace\..*",
        UNNEEDED,
        "profile.steps writes a JAX trace of a step",
    ),
    (
        r"data\.(return_.*|tokenizer|use_shm|.*workers|validation_shuffle|trust_remote_code"
        r"|image_patch_size|pad_mode|ignore_input_ids_mismatch|tools_key|custom_cls\.name"
        r"|enable_thinking.*|balance_dp_token)",
        UNNEEDED,
        "rows are read, rendered and packed in one way",
    ),
    (r"data\.gen_batch_size", UNNEEDED, "prompts are generated as a step needs them"),
    (
        r".*(micro_batch_size(_per_gpu)?|use_dynamic_bsz|pad_to_length.*)|data\.max_token_len_per_gpu",
        UNNEEDED,
        "a micro-batch has learner.token_budget tokens, always packed",
    ),
    (
        r".*max_token_len_per_gpu",
        UNNEEDED,
        "scoring uses the micro-batches of the update (score.token_budget, ref.token_budget)",
    ),
    (
        r".*\.(strategy|use_torch_compile|use_remove_padding|use_liger|use_fused_kernels"
        r"|fused_kernel_options\..*|entropy_checkpointing|entropy_from_logits.*|use_shm"
        r"|enforce_eager|cudagraph.*|compilation_config\..*|layered_summon|model_engine)"
        r"|model_engine|engine|optim|model|\w+@.*",
        UNNEEDED,
        "all programs are compiled, rows are packed, logprob and entropy are fused and chunked",
    ),
    (
        r".*\.expert_tensor_parallel_size|.*\.(etp|etp_size)|.*\.moe_tensor_parallel_size",
        UNNEEDED,
        "the experts are sharded over mesh.expert and mesh.tensor",
    ),
    (
        r"actor_rollout_ref\.actor\.(fsdp_config|megatron|veomni|engine)\.param_offload|engine\.param_offload",
        DIFFERS,
        "weights stay on the devices; learner.offload=('policy',) with rollout.release_kv moves "
        "them to host memory during rollouts",
    ),
    (
        r"actor_rollout_ref\.ref\..*\.(param|optimizer|grad)_offload",
        UNNEEDED,
        "no separate reference model is loaded: there is no KL term, or there are adapters",
    ),
    (r".*\.(grad_offload|offload_policy)", UNNEEDED, "gradients exist during updates only"),
    (r".*override_optimizer_config.*offload.*|.*overlap_cpu_optimizer.*", UNNEEDED, "of Megatron"),
    (r".*virtual_pipeline.*|.*\.vpp", NONE, "a pipeline stage has one chunk of layers"),
    (
        r".*\.router_replay\.(record|replay)_file",
        NONE,
        "experts are replayed within a step, not from a file",
    ),
    (
        r".*\.enable_rollout_routing_replay",
        UNNEEDED,
        "learner.router_replay='R3' lets the engine record experts",
    ),
    (
        r".*\.(moe_z_loss_coeff|router_replay\..*|mtp\..*|qat\..*"
        r"|freeze_moe_router)",
        NONE,
        "jaxrl does not have it yet",
    ),
    (r".*\.freeze_vision_tower", UNNEEDED, "the run reads no images, or has this as its default"),
    (
        r"data\.mm_processor_kwargs.*",
        NONE,
        "data.image_kwargs sets what the model's image processor reads",
    ),
    (
        r"actor_rollout_ref\.rollout\.(gpu_memory_utilization)",
        DIFFERS,
        "vLLM's share of memory; rollout.memory_utilization is the fraction for weights, "
        "optimizer, programs and KV pages together",
    ),
    (
        r"actor_rollout_ref\.rollout\.max_num_batched_tokens",
        DIFFERS,
        "rollout.max_num_batched_tokens counts prefill tokens of one dispatch only",
    ),
    (
        r"actor_rollout_ref\.rollout\.agent\.num_workers",
        DIFFERS,
        "env.workers is the number of concurrent episodes",
    ),
    (
        r"actor_rollout_ref\.rollout\.multi_turn\..*",
        UNNEEDED,
        "multi_turn.enable is off; env.name makes episodes of several turns",
    ),
    (
        r"actor_rollout_ref\.rollout\.(name|mode|dtype|load_format|max_model_len|disable_.*"
        r"|enable_chunked_prefill|prompt_length|response_length|do_sample|nnodes"
        r"|data_parallel_size|update_weights.*|multi_stage.*|over_sample_rate|skip_.*|n_gpus_per_node"
        r"|calculate_log_probs|checkpoint_engine\..*|engine_kwargs\..*|logprobs_mode|seed"
        r"|enable_sleep_mode|standalone_gpu_memory_utilization|agent\..*|prometheus\..*|pipeline_model_parallel_size)",
        UNNEEDED,
        "jaxrl's engine is part of the program, with its own scheduler and the trainer's arrays",
    ),
    (
        r"actor_rollout_ref\.actor\.(kl_loss_.*)|algorithm\.(kl_ctrl\..*|kl_penalty)"
        r"|actor_rollout_ref\.ref\..*",
        UNNEEDED,
        "no KL term uses it",
    ),
    (
        r"actor_rollout_ref\.actor\.(clip_ratio_c|tau_.*|policy_loss\..*)",
        UNNEEDED,
        "the policy loss of this run does not read it",
    ),
    (r"algorithm\.(gamma|lam)", UNNEEDED, "the advantage of this run does not read it"),
    (r"critic\..*", UNNEEDED, "this run has no critic, or it has this of the learner"),
    (
        r".*rollout_correction\..*",
        UNNEEDED,
        "this correction is off",
    ),
    (
        r"algorithm\.filter_groups\..*",
        DIFFERS,
        "groups are compared by their reward, with all penalties",
    ),
    (
        r"actor_rollout_ref\.(hybrid_engine|nccl_timeout)|ray_kwargs\..*|transfer_queue\..*"
        r"|trainer\.(balance_batch|n_gpus_per_node|nnodes|device|ray_.*|use_legacy.*|esi_.*"
        r"|del_local.*|worker_env\..*|default_hdfs_dir|resume_from_path|max_critic.*|use_v1|rollout_data_dir"
        r"|validation_data_dir|resume_mode)|rollout\.(nnodes|n_gpus_per_node)",
        UNNEEDED,
        "JAX uses all devices, mesh arranges them; runs always resume and log their samples",
    ),
    (r"(actor\.)?(.*\.)?checkpoint\..*", UNNEEDED, "checkpoints always have the whole state"),
    (
        r"reward_model\..*|reward\.reward_model\..*|reward\.num_workers",
        UNNEEDED,
        "reward functions run in worker processes, a reward model in the engine's program",
    ),
    (
        r"distillation\.distillation_loss\.log_prob_min_clamp",
        DIFFERS,
        "verl bounds logprobs; algorithm.kl_clamp bounds the log ratio",
    ),
    (r"distillation\..*", UNNEEDED, "an option of verl's distillation workers"),
    (r"async_training\..*", UNNEEDED, "set by schedule.mode=async"),
)
