"""Settings live in groups: titles, checks, the mark `resumable`, and an order that stays."""

from __future__ import annotations

import pytest

from treeprop_ray import config
from treeprop_ray.config import cli
from treeprop_ray.config.fields import title_of
from treeprop_ray.errors import UserError

ORDER = """
experiment name out fresh init_from init_strict resume_with_changes seed method
engine placement hosts head_copies cpus_per_actor gpus_per_actor strategy transport in_flight
snapshot_every
keep_steps
max_failures elastic wave_timeout timeline_steps ray device precision threads microbatches
replicas shard_optimizer reduce recompute compile compile_backend
epochs steps batch accumulate freeze optimizer lr chain_lr weight_decay decay_norms momentum
betas eps schedule warmup clip finish coarsen finish_path
finish_from finish_sweeps patience
split family objective alpha beta correction correction_scale input ce_at reduction
bernoulli levels sigma noise_schedule mc_samples target_gradient detach_levels weights
model data time probe cff loss
log_every loggers wandb mlflow metrics callbacks
eval_every eval_test checkpoint_every storage keep_last keep_best
"""

MAY_DIFFER = """
elastic shard_optimizer
data.epoch_steps name out fresh engine device threads log_every checkpoint_every keep_last
keep_best epochs steps data.root experiment placement hosts head_copies cpus_per_actor
gpus_per_actor strategy transport in_flight timeline_steps snapshot_every keep_steps max_failures
wave_timeout storage recompute eval_test ray.address compile compile_backend ray.num_cpus
ray.dashboard resume_with_changes probe.every probe.batches probe.draws time.shards patience
loggers wandb mlflow metrics callbacks
"""


def test_config_yaml_keeps_the_order_of_its_keys() -> None:
    lines = config.to_yaml(config.Settings()).splitlines()
    assert [line.partition(":")[0] for line in lines if line[0] not in " -"] == ORDER.split()


def test_what_may_differ_when_a_run_is_taken_up_again() -> None:
    assert set(MAY_DIFFER.split()) == config.RESUMABLE


@pytest.mark.parametrize(
    ("words", "may_differ"),
    [
        ([], True),
        (["schedule=cosine"], False),
        (["warmup=0.1"], False),
        (["finish=0.1"], False),
        (["method=cff"], False),
        (["method=bp"], True),
        (["cff.head_share=0.5"], True),
    ],
)
def test_epochs_may_differ_unless_a_step_depends_on_their_number(
    words: list[str], may_differ: bool
) -> None:
    old, new = config.load([*words, "epochs=3"]), config.load([*words, "epochs=4"])
    assert config.differences(old, new) == ([] if may_differ else ["epochs: 3 -> 4"])


def test_every_key_belongs_to_a_group_with_a_title_and_help_shows_them_all() -> None:
    settings = config.Settings()
    text = cli.help_text("", settings).splitlines()
    titles = {title for title, _ in config.describe(settings)}
    assert len(titles) == 13 and titles <= set(text)
    for key, _, _ in config.walk(settings):
        title = title_of(settings, key)
        assert title.endswith(".") and title in titles
        below = text[text.index(title) + 1 :]
        block = below[: below.index("")] if "" in below else below
        assert key in [line.split()[0] for line in block]


def test_groups_check_themselves_wherever_they_stand() -> None:
    with pytest.raises(UserError, match=r"^time.shards=3: a power of 2"):
        config.load(["experiment=digits_gru", "time.shards=3"])
    with pytest.raises(UserError, match=r"^data.tokenizer=gpt2: data.name=digits is no text"):
        config.load(["data.tokenizer=gpt2"])
    with pytest.raises(UserError, match=r"^name=..: a plain folder name"):
        config.load(["name=.."])
