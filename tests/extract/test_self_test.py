"""The self-test of models: every registered architecture passes it on its real code, and planted faults do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toy_models
from layerlake.errors import ModelError
from layerlake.extract import architectures, hooks
from layerlake.extract.architectures import ARCHITECTURES, Place
from layerlake.extract.loaded_model import LoadedModel, ModelSource
from layerlake.extract.loading import load_model
from layerlake.extract.self_test import Check, SelfTest
from processes import run_layerlake
from toy_models import REGISTERED, save_model


def load(tmp_path, family: str, dtype: torch.dtype = torch.float32, **options) -> LoadedModel:
    return load_model(ModelSource(str(save_model(tmp_path / family, family, dtype=dtype, **options))))


def failing(model: LoadedModel) -> dict[str, Check]:
    return {c.name: c for c in SelfTest(model).run() if c.passed is False}


def test_every_registered_architecture_is_tested():
    assert set(REGISTERED) == set(ARCHITECTURES)


@pytest.mark.parametrize("family", REGISTERED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_registered_architecture_passes(tmp_path, family, dtype):
    model = load(tmp_path, family, dtype)
    checks = {c.name: c for c in SelfTest(model).run()}
    assert [c for c in checks.values() if c.passed is False] == []
    applied = {n for n, c in checks.items() if c.passed}
    assert applied >= {"repeats", "moment", "blocks", "embedding", "chain", "sums", "head", "alone", "right", "left"}
    assert applied >= {"patched back", "edits"}
    assert ("states" in applied) == (family in ("mamba", "mamba2", "jamba"))
    assert all(c.worst is not None and c.limit is not None for n, c in checks.items() if c.passed and n != "edits")
    if dtype == torch.float32:
        assert max(c.worst for c in checks.values() if c.worst is not None) < 2e-5


@pytest.mark.parametrize(
    ("family", "options", "lacks"),
    [
        ("gpt_neox", {"use_parallel_residual": False}, ()),
        ("gpt_neox", {"use_parallel_residual": True}, ("resid_mid",)),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}, ("final_norm",)),
        ("opt", {"word_embed_proj_dim": 16}, ()),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, ()),
        ("gpt2", {"tie_word_embeddings": False}, ()),
        ("mamba", {"residual_in_fp32": True, "use_conv_bias": False, "use_bias": True}, ()),
        ("mamba2", {"n_groups": 1, "use_bias": True}, ()),
        ("llama", {"attn_implementation": "eager", "attention_bias": True}, ()),
    ],
)
def test_variants_of_an_architecture_pass(tmp_path, family, options, lacks):
    model = load(tmp_path, family, **options)
    assert failing(model) == {}
    sites = {p.site for p in model.points}
    assert not sites & set(lacks)
    assert sites >= {"embed", "resid_pre", "resid_post", "logits"}


def test_a_masked_language_model_has_logits(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "m")
    model = load_model(ModelSource(str(tmp_path / "m")))
    assert failing(model) == {}
    assert model.shapes["logits"] == (50,)


@pytest.mark.parametrize("family", ["phi", "olmo2", "cohere"])
def test_an_architecture_nobody_registered_is_found_by_its_structure(tmp_path, family):
    assert family not in ARCHITECTURES
    model = load(tmp_path, family)
    assert model.identity["found"]["blocks"] == "layers"
    assert [p.name for p in model.points if p.site == "resid_post"] == ["resid_post-0", "resid_post-1", "resid_post-2"]
    assert {p.site for p in model.points} == {"embed", "resid_pre", "resid_post", "final_norm", "logits"}
    assert failing(model) == {}


def test_a_found_architecture_that_fails_its_self_test_is_refused(tmp_path):
    """RoBERTa counts positions from 2: with positions from 0, values would be plausible and wrong."""
    import transformers

    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    transformers.RobertaModel(config).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="no registered architecture.*roberta.*plain forward of one sequence"):
        load_model(ModelSource(str(tmp_path / "m")))


def test_a_found_model_whose_head_is_not_under_its_name_is_refused(tmp_path):
    """The prefix that Llama 4 names is not where its headless part lies."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_local_experts=2,
        pad_token_id=0,
    )
    transformers.Llama4ForCausalLM(config).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="no registered architecture.*llama4_text.*output: inf"):
        load_model(ModelSource(str(tmp_path / "m")))


def test_a_found_model_that_feels_no_edit_is_refused(tmp_path):
    """A head of zeros, as some checkpoints begin with: nothing that is done before it can be seen behind it."""
    model = toy_models.make_model("phi")
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="an edit at any site that can be edited changes the output .embed, "):
        load_model(ModelSource(str(tmp_path / "m")))


def test_a_seed_below_zero_is_a_wrong_request():
    result = run_layerlake("doctor", "toy_models:lstm", "--seed", -1)
    assert result.returncode == 2
    assert "--seed" in result.stderr


def test_a_model_of_any_length_may_say_so(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=50, d_model=32, n_layer=2, n_head=4, d_inner=48)
    assert config.max_position_embeddings == -1
    transformers.XLNetLMHeadModel(config).save_pretrained(tmp_path / "m")
    model = load_model(ModelSource(str(tmp_path / "m")))
    assert model.max_length is None
    assert failing(model) == {}


def test_a_model_without_a_list_of_blocks_is_refused(tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=50, embedding_size=16, hidden_size=32, num_attention_heads=4, intermediate_size=48
    )
    transformers.AlbertModel(config).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="no list of blocks.*TorchModel"):
        load_model(ModelSource(str(tmp_path / "m")))


def plant(monkeypatch, family: str, **changes) -> None:
    real = ARCHITECTURES[family]
    monkeypatch.setitem(ARCHITECTURES, family, lambda config: replace(real(config), **changes))


def with_place(family: str, site: str, place: Place) -> dict[str, Place]:
    import transformers

    config = transformers.AutoConfig.for_model(family)
    return {**ARCHITECTURES[family](config).places, site: place}


class TestPlantedFaults:
    """Each fault is one that was made in public; the check that shall notice it is named."""

    def test_the_attention_before_its_norm_in_a_sandwich_block(self, tmp_path, monkeypatch):
        plant(monkeypatch, "gemma2", places=with_place("gemma2", "attn_out", Place("self_attn")))
        assert set(failing(load(tmp_path, "gemma2"))) == {"sums"}

    def test_the_mlp_inside_of_its_own_sum(self, tmp_path, monkeypatch):
        plant(monkeypatch, "bloom", places=with_place("bloom", "mlp_out", Place("mlp")))
        assert set(failing(load(tmp_path, "bloom"))) == {"sums"}

    def test_positions_left_out_of_the_embedding(self, tmp_path, monkeypatch):
        plant(monkeypatch, "gpt2", embedding=architectures._rows)
        assert set(failing(load(tmp_path, "gpt2"))) == {"embedding"}

    def test_another_norm_taken_for_the_final_one(self, tmp_path, monkeypatch):
        plant(monkeypatch, "llama", final_norm="layers.2.post_attention_layernorm")
        assert "head" in failing(load(tmp_path, "llama"))

    def test_layers_off_by_one(self, tmp_path):
        model = load(tmp_path, "llama")
        blocks = [p for p in model.points if p.site == "resid_post"]
        for point, other in zip(blocks[:2], (blocks[1], blocks[0]), strict=True):
            model.points[model.points.index(point)] = replace(point, module=other.module)
        assert set(failing(model)) >= {"blocks", "chain", "sums"}

    def test_E04_positions_that_count_padding(self, tmp_path):
        model = load(tmp_path, "gpt2")
        real = model.forward

        def without_positions(batch, whole):
            positions = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
            return real(replace(batch, position_ids=positions), whole)

        model.forward = without_positions
        assert set(failing(model)) == {"left"}

    def test_a_mask_that_is_forgotten(self, tmp_path):
        model = load(tmp_path, "bert")
        real = model.forward
        model.forward = lambda batch, whole: real(
            replace(batch, attention_mask=torch.ones_like(batch.attention_mask)), whole
        )
        assert set(failing(model)) == {"right", "left"}

    def test_dropout_left_on(self, tmp_path):
        model = load(tmp_path, "bert")
        model.module.train()
        assert "repeats" in failing(model)

    def test_E20_values_changed_in_place_after_they_were_captured(self, monkeypatch):
        def keep(self, point, raw):
            self.values[point.name] = self._laid_out(point, raw)

        assert failing(load_model(ModelSource("toy_models:in_place"))) == {}
        monkeypatch.setattr(hooks.SiteHooks, "_take", keep)
        assert "moment" in failing(load_model(ModelSource("toy_models:in_place")))

    def test_states_shifted_by_one_token(self, tmp_path, monkeypatch):
        real = with_place("mamba", "z", Place("x"))["ssm_state"]
        shifted = replace(real, derive=lambda mixer, call: real.derive(mixer, call).roll(1, dims=1))
        plant(monkeypatch, "mamba", places=with_place("mamba", "ssm_state", shifted))
        assert set(failing(load(tmp_path, "mamba"))) >= {"states"}

    def test_I05_an_edit_that_is_never_applied(self, tmp_path, monkeypatch):
        monkeypatch.setattr(hooks, "replace_main_output", lambda output, value: output)
        assert set(failing(load(tmp_path, "llama"))) == {"edits"}

    def test_a_padding_side_declared_wrongly(self, monkeypatch):
        monkeypatch.setattr(
            toy_models, "lstm", lambda: toy_models.TorchModel(toy_models.TorchLSTM(), padding=("right", "left"))
        )
        assert set(failing(load_model(ModelSource("toy_models:lstm")))) == {"left"}
