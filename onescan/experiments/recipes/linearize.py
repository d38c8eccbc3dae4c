"""Linear models initialized from trained softmax models: attention transfer, then training.

Both recipes take the model, except for the mixer, from the config of `--init-from`. If that is a
trained run, they also take its data, task and training settings; see `from_teacher`.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from onescan import configs
from onescan.experiments.data import DeitAugmentConfig, ImageDatasetConfig
from onescan.experiments.data.text import TextDatasetConfig
from onescan.experiments.recipes import table
from onescan.experiments.recipes.mixers import with_mixer
from onescan.experiments.tasks import ImageClassificationConfig, LanguageModellingConfig
from onescan.experiments.tasks.base import fitting_batch_size
from onescan.experiments.training import RunConfig, TrainingConfig, TransferConfig
from onescan.experiments.training.convert import NO_DATA
from onescan.experiments.training.runs import model_config, run_config
from onescan.layers.position import TokenPositionConfig
from onescan.messages import named_type
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.presets import preset

VIT_MIXER, GPT2_MIXER = "lightnet", "lion_s"  # best after short training in docs/results.md
IMAGE_FIELDS = ("image_size", "channels", "mean", "std", "test_crop")  # that the teacher determines


def linearize_vit() -> RunConfig:
    """LightNet initialized from a trained ViT or DeiT, on ImageNet-1k or your own images.

    onescan train linearize_vit --init-from MODEL --data.path FOLDER

    MODEL is a run with softmax attention, or the output of onescan convert. FOLDER contains images
    as for the other recipes. Image and patch size, width, depth, MLP, positions and the
    standardization of images are those of MODEL. If it was trained by onescan, so are data, task
    and training settings, and --data.path is not needed. With --data.path, the number of classes is
    that of the data, and the batch size is smaller if there are few images. --model.mixer selects
    another mixer, such as lion_lit or lion_s; lightnet_hybrid keeps the softmax attention of every
    fourth block.

    First, each mixer learns to reproduce the mixer of MODEL in the same layer (--transfer.steps).
    Then all weights are trained on the labels, and with --task.teacher MODEL also by distillation.
    The defaults shown without --init-from are those of DeiT-tiny. This recipe has not been run on
    ImageNet yet.
    """
    run = RunConfig(
        name="linearize_vit",
        model=preset("deit_tiny"),
        data=ImageDatasetConfig(path="ILSVRC/imagenet-1k"),
        task=ImageClassificationConfig(label_smoothing=0.1, augment=DeitAugmentConfig()),
        init_from="",
        transfer=TransferConfig(),
        training=TrainingConfig(epochs=30, batch_size=256, learning_rate=5e-4),
    )
    return with_mixer(run, VIT_MIXER)


def linearize_gpt2() -> RunConfig:
    """Causal LION-s initialized from a trained GPT-2, on your own text.

    onescan train linearize_gpt2 --init-from MODEL --data.path FILE

    MODEL is a causal language model with softmax attention: a run, or the output of onescan
    convert. FILE is text as for the other recipes. Width, depth, MLP, learned positions, vocabulary
    and tokenizer are those of MODEL. If it was trained by onescan, so are data, task and training
    settings, and --data.path is not needed. --model.mixer selects another mixer, such as lightnet;
    lion_s_hybrid keeps the softmax attention of every fourth block.

    First, each mixer learns to reproduce the mixer of MODEL in the same layer (--transfer.steps).
    Then all weights are trained to predict the next token. The new model reads at most as many
    tokens as MODEL has positions. The defaults shown without --init-from are those of GPT-2 with
    124 million parameters. This recipe has not been run at this size yet.
    """
    run = RunConfig(
        name="linearize_gpt2",
        model=preset("gpt2_small"),
        data=TextDatasetConfig(path="", tokenizer="openai-community/gpt2", length=512),
        task=LanguageModellingConfig(evaluation_batch_size=8),
        init_from="",
        transfer=TransferConfig(),
        training=TrainingConfig(
            epochs=1,
            batch_size=32,
            learning_rate=3e-4,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            evaluate_every=0.1,
            checkpoint_every=0.1,
        ),
    )
    return with_mixer(run, GPT2_MIXER)


def from_teacher(run: RunConfig, given: Mapping[str, str]) -> RunConfig:
    """Return the run with the settings of the model that it starts from.

    Args:
        run: One of these recipes.
        given: The user's options by dotted name; only init_from and model.mixer are read.

    Raises:
        ValueError: If init_from is missing, cannot be read, or holds a model of another class.
    """
    name = given.get("init_from")
    if not name:
        raise ValueError(
            "init_from is missing, expected a trained model with softmax attention: "
            f"onescan train {run.name} --init-from PATH"
        )
    source, model = run_config(name), model_config(name)
    if not isinstance(model, type(run.model)):
        raise ValueError(
            f"init_from is {name!r}, which contains the weights of {named_type(model)}, expected "
            f"{named_type(run.model)}"
        )
    data: Any = run.data
    if source is not None and getattr(source.data, "path", None) != NO_DATA:
        run = dataclasses.replace(
            source, name=run.name, transfer=run.transfer, machine=run.machine, init_from=name
        )
        data = source.data
    elif source is not None:
        known = {field: getattr(source.data, field) for field in IMAGE_FIELDS}
        data = dataclasses.replace(data, **known)
    else:
        position: Any = getattr(model, "position", None)
        has_limit = isinstance(position, TokenPositionConfig)
        length = min(data.length, position.max_tokens) if has_limit else data.length
        data = dataclasses.replace(data, tokenizer=name, length=length)
    run = dataclasses.replace(run, model=model, data=data, init_from=name)
    default = VIT_MIXER if isinstance(model, ImageClassifierConfig) else GPT2_MIXER
    return with_mixer(run, given.get("model.mixer") or default)


def fit_to_data(run: RunConfig, given: Collection[str]) -> tuple[RunConfig, list[str]]:
    """Adapt the batch size and the number of classes to the data at `data.path`.

    Args:
        run: Config from `from_teacher`, with the user's changes.
        given: Dotted names of the fields that the user set, which are kept.

    Returns:
        The config, and lines that describe the changes.

    Raises:
        ValueError: If the data cannot be read; see `DataConfig.build`.
    """
    if "data.path" not in given:
        return run, []
    splits, lines = run.data.build(), []
    names, model, settings = getattr(splits, "class_names", ()), run.model, run.training
    classes: int = getattr(model, "num_classes", 0)
    if classes not in (0, len(names)) and "model.num_classes" not in given:
        run = configs.replace(run, {"model.num_classes": len(names)})
        lines.append(f"model: {len(names)} classes, as in the data, instead of {classes}")
    size = fitting_batch_size(len(splits.train), settings.batch_size)
    is_free = not {"training.batch_size", "training.initial_batch_size"} & set(given)
    if size < settings.batch_size and is_free and settings.initial_batch_size is None:
        run = configs.replace(run, {"training.batch_size": size})
        lines.append(
            f"training: batch size {size} instead of {settings.batch_size}, because there are "
            f"{len(splits.train):,} training examples"
        )
    return run, lines


RECIPES = {
    name: dataclasses.replace(recipe, adapt=from_teacher, infer=fit_to_data)
    for name, recipe in table(linearize_vit, linearize_gpt2).items()
}
