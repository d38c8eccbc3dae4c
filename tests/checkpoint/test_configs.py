"""Configs to JSON types and back, with errors that name the field."""

import importlib
import json
import math
import pkgutil
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, make_dataclass
from typing import Literal

import pytest

import onescan
from onescan import configs
from onescan.experiments.data import DataConfig
from onescan.experiments.tasks import TaskConfig
from onescan.inputs import Format
from onescan.layers.mixers import (
    LightNetMixerConfig,
    LinearDiffusionMixerConfig,
    MambaMixerConfig,
    MixerConfig,
    SoftmaxMixerConfig,
)
from onescan.models.presets import preset


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ABC):
    @abstractmethod
    def build(self): ...


@dataclass(frozen=True, kw_only=True)
class ElectricConfig(EngineConfig):
    volts: float = 12.0

    def build(self): ...


@dataclass(frozen=True, kw_only=True)
class SteamConfig(EngineConfig):
    bars: int = 3
    fuel: Literal["coal", "wood"] = "coal"

    def build(self): ...


@dataclass(frozen=True, kw_only=True)
class RackConfig:
    teeth: int = 9


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    name: str
    engine: EngineConfig = field(default_factory=ElectricConfig)
    spare: ElectricConfig | SteamConfig | None = None
    rack: RackConfig | None = None
    wagons: tuple[EngineConfig, ...] = ()
    gauge: tuple[float, float] = (1.435, 0.5)
    lit: bool = True
    limit: int | None = None


TRAIN = TrainConfig(
    name="t",
    engine=SteamConfig(bars=4),
    spare=SteamConfig(),
    rack=RackConfig(),
    wagons=(ElectricConfig(), SteamConfig(fuel="wood")),
    limit=3,
)


def test_a_config_survives_json():
    plain = json.loads(json.dumps(configs.to_dict(TRAIN)))
    assert plain["engine"] == {"type": "SteamConfig", "bars": 4, "fuel": "coal"}
    assert plain["rack"] == {"teeth": 9}  # only one class fits: no "type" needed
    assert configs.from_dict(TrainConfig, plain) == TRAIN
    assert configs.from_dict(TrainConfig, {"name": "t"}) == TrainConfig(name="t")


def test_an_int_widens_to_float_and_a_list_to_tuple():
    loaded = configs.from_dict(TrainConfig, {"name": "t", "gauge": [1, 2]})
    assert loaded.gauge == (1.0, 2.0)
    assert type(loaded.gauge[0]) is float


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"nmae": "t"}, r"nmae is unknown \(perhaps you meant 'name'\); available: name, engine"),
        ({}, "name is missing, expected str"),
        ({"name": 3}, "name is 3, expected str"),
        ({"name": "t", "limit": True}, r"limit is True, expected int \| None"),
        ({"name": "t", "limit": 1.5}, r"limit is 1.5, expected int \| None"),
        ({"name": "t", "lit": 1}, "lit is 1, expected bool"),
        ({"name": "t", "gauge": [1, 2, 3]}, r"gauge is \[1, 2, 3\], expected tuple\[float, float"),
        ({"name": "t", "gauge": [1, "x"]}, r"gauge\[1\] is 'x', expected float"),
        ({"name": "t", "gauge": [1, 10**400]}, r"gauge\[1\] is 10+\.\.\.0+, expected float"),
        ({"name": "t", "limit": 2**63}, r"limit is 9223372036854775808, expected int \| None"),
        ({"name": {"a": 1}}, r"name is \{'a': 1\}, expected str"),
        (
            {"name": "t", "engine": 3},
            "engine is 3, expected EngineConfig, one of ElectricConfig, SteamConfig",
        ),
        ({"name": "t", "engine": {}}, "engine.type is missing; available: ElectricConfig, Steam"),
        (
            {"name": "t", "engine": {"type": "StemConfig"}},
            "engine.type 'StemConfig' is not an imported class: import the file that defines it "
            r"first \(.* --import FILE.py\); available: ElectricConfig, SteamConfig$",
        ),
        ({"name": "t", "engine": {"type": ["x"]}}, r"engine.type \['x'\] is not an imported class"),
        (
            {"name": "t", "engine": {"type": "TrainConfig"}},
            "engine.type 'TrainConfig' is not an imported class",
        ),
        ({"name": "t", "engine": {"type": "SteamConfig", "bar": 1}}, r"engine.bar is .*'bars'"),
        (
            {"name": "t", "engine": {"type": "SteamConfig", "fuel": "oil"}},
            r"engine.fuel is 'oil', expected Literal\['coal', 'wood'\]",
        ),
        ({"name": "t", "spare": {"bars": 1}}, "spare.type is missing"),
        ({"name": "t", "rack": 1}, r"rack is 1, expected RackConfig \| None"),
        ({"name": "t", "wagons": [{"type": "SteamConfig", "bars": "x"}]}, r"wagons\[0\].bars is"),
    ],
)
def test_loading_refuses_what_does_not_fit(data, says):
    with pytest.raises(ValueError, match=says):
        configs.from_dict(TrainConfig, data)


def test_saving_refuses_what_json_has_no_type_for():
    with pytest.raises(ValueError, match=r"rack\.teeth is a set, which a config cannot contain"):
        configs.to_dict(_unchecked(TrainConfig(name="t"), rack=_unchecked(RackConfig(), teeth={1})))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_saving_refuses_numbers_that_json_cannot_represent(value):
    with pytest.raises(ValueError, match=rf"^gauge\[1\] is {value}, expected a finite number$"):
        configs.to_dict(TrainConfig(name="t", gauge=(1.0, value)))


def test_replace_reaches_nested_fields():
    changed = configs.replace(
        TRAIN, {"engine.bars": 5, "engine.fuel": "wood", "name": "u", "gauge": (1, 2)}
    )
    assert changed.engine == SteamConfig(bars=5, fuel="wood")
    assert (changed.name, changed.gauge, changed.wagons) == ("u", (1.0, 2.0), TRAIN.wagons)
    swapped = configs.replace(TRAIN, {"engine": ElectricConfig(), "engine.volts": 24})
    assert swapped.engine == ElectricConfig(volts=24.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine.bar": 1}, r"engine.bar is unknown \(perhaps you meant 'bars'\)"),
        ({"engne.bars": 1}, r"engne is unknown \(perhaps you meant 'engine'\)"),
        ({"name.first": 1}, "name is 't', which has no field 'first'"),
        ({"engine.bars": "many"}, "engine.bars is 'many', expected int"),
    ],
)
def test_replace_refuses_what_does_not_fit(changes, says):
    with pytest.raises(ValueError, match=says):
        configs.replace(TRAIN, changes)


def test_differences_name_the_paths():
    other = configs.replace(TRAIN, {"engine.bars": 1, "rack": None, "spare": ElectricConfig()})
    assert configs.differences(TRAIN, other) == [
        ("engine.bars", 4, 1),
        ("spare.type", "SteamConfig", "ElectricConfig"),
        ("rack", RackConfig(), None),
    ]
    assert configs.differences(TRAIN, TRAIN) == []


def test_a_class_that_is_defined_anew_is_the_same_config():
    def define(**fields):
        return make_dataclass("Engine", fields.items(), frozen=True)

    first, second, third = define(a=int), define(a=int), define(a=int, b=int)
    assert configs.differences(first(1), second(1)) == []
    assert configs.differences(first(1), third(2, 3)) == [("a", 1, 2), ("b", None, 3)]


def test_configs_do_not_import_torch():
    code = "import sys, onescan.configs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_classes_of_the_package_are_imported_when_a_config_names_them():
    code = (
        "import sys\n"
        "from dataclasses import dataclass\n"
        "from onescan.configs import from_dict\n"
        "from onescan.experiments.tasks.base import TaskConfig\n"
        "@dataclass(frozen=True)\n"
        "class Holder:\n"
        "    task: TaskConfig\n"
        "assert 'onescan.experiments.tasks.recall' not in sys.modules\n"
        "print(from_dict(Holder, {'task': {'type': 'RecallTaskConfig'}}))\n"
        "for name in ('import_module', 'os', ['x']):\n"
        "    try: from_dict(Holder, {'task': {'type': name}})\n"
        "    except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *errors = done.stdout.splitlines()
    assert first == "Holder(task=RecallTaskConfig(evaluation_batch_size=256))"
    assert len(errors) == 3
    assert all("is not an imported class" in error for error in errors)


def test_packages_export_all_their_configs():
    for module in pkgutil.walk_packages(onescan.__path__, "onescan."):
        if {"inputs", "data", "models", "tasks"} & set(module.name.split(".")):
            importlib.import_module(module.name)
    for base, package in (
        (configs.ModelConfig, onescan),
        (DataConfig, onescan.experiments.data),
        (Format, onescan.inputs),
        (TaskConfig, onescan.experiments.tasks),
    ):
        names = {
            cls.__name__ for cls in configs._family(base) if cls.__module__.startswith("onesc")
        }
        assert len(names) >= 6
        # Private classes are never saved.
        assert {name for name in names if not name.startswith("_")} <= set(package.__all__)


def _unchecked(config, **values):
    for name, value in values.items():
        object.__setattr__(config, name, value)
    return config


@pytest.mark.parametrize(
    ("name", "field"),
    [("hidden_size", "width"), ("n_layer", "depth"), ("nhead", "mixer.num_heads")],
)
def test_names_of_other_libraries_are_translated(name, field):
    with pytest.raises(ValueError, match=f"^{name} is unknown; onescan calls it '{field}'$"):
        preset("lightnet_tiny", **{name: 64})


def test_an_unknown_mixer_lists_the_mixers():
    with pytest.raises(ValueError, match=r"mixer is 'softmax', .* one of .*SoftmaxMixerConfig"):
        preset("lightnet_tiny", mixer="softmax")


@pytest.mark.parametrize(
    ("stored", "config"),
    [
        ({"type": "LightNetMixerConfig", "causal": True}, LightNetMixerConfig(direction="forward")),
        (
            {"type": "LightNetMixerConfig", "gate": True, "gate_activation": "silu"},
            LightNetMixerConfig(gate="silu"),
        ),
        (
            {"type": "LightNetMixerConfig", "gate": False, "gate_activation": "silu"},
            LightNetMixerConfig(gate="none"),
        ),
        ({"type": "LightNetMixerConfig", "gate": True}, LightNetMixerConfig()),
        ({"type": "SoftmaxMixerConfig", "causal": False}, SoftmaxMixerConfig()),
        (
            {"type": "LinearDiffusionMixerConfig", "causal": True},
            LinearDiffusionMixerConfig(direction="forward"),
        ),
        ({"type": "MambaMixerConfig", "gate": True}, MambaMixerConfig()),
        ({"type": "MambaMixerConfig", "gate": False}, MambaMixerConfig(gate="none")),
    ],
)
def test_settings_of_earlier_versions_are_translated(stored, config):
    assert configs.from_dict(MixerConfig, stored) == config


@pytest.mark.parametrize(
    "stored",
    [
        {"type": "LightNetMixerConfig", "causal": True, "direction": "both"},
        {"type": "LightNetMixerConfig", "causal": 1},
        {"type": "LionMixerConfig", "causal": True},
    ],
)
def test_only_settings_that_earlier_versions_stored_are_translated(stored):
    with pytest.raises(ValueError, match="causal is unknown; onescan calls it 'direction'"):
        configs.from_dict(MixerConfig, stored)


def test_old_names_are_translated_only_where_they_were_stored():
    with pytest.raises(ValueError, match=r"mixer\.causal is unknown; onescan calls it 'direction'"):
        preset("lightnet_tiny", **{"mixer.causal": True})
