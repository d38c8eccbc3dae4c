"""Recipes for your own images, arrays and texts; `infer` infers their settings from the data."""

import dataclasses

from onescan.configs import ModelConfig
from onescan.experiments.data import (
    ArrayDatasetConfig,
    DeitAugmentConfig,
    ImageDatasetConfig,
    TextDatasetConfig,
    TextTableConfig,
)
from onescan.experiments.recipes import table
from onescan.experiments.recipes.infer import (
    AUGMENT,
    DENSE_MODEL,
    HALF,
    INFERRED,
    ROW,
    adapt,
    infer,
)
from onescan.experiments.recipes.small_text import (
    SMALL_LM,
    SMALL_MASKS,
    SMALL_MLM,
    SMALL_TRAINING,
)
from onescan.experiments.tasks import (
    ImageClassificationConfig,
    ImageGenerationConfig,
    LanguageModellingConfig,
    RegressionConfig,
    SegmentationConfig,
    SequenceClassificationConfig,
    TaskConfig,
)
from onescan.experiments.training import RunConfig, TrainingConfig
from onescan.layers.mixers import LightNetMixerConfig
from onescan.layers.position import ToeplitzPositionConfig
from onescan.models.denoiser import DenoiserConfig, NoiseConfig, SamplerConfig
from onescan.models.image_classifier import ImageClassifierConfig
from onescan.models.sequence_classifier import SequenceClassifierConfig


def image_classifier() -> RunConfig:
    """LightNet on your own images or arrays; settings are inferred from the data.

    onescan train image_classifier --data.path FOLDER

    FOLDER contains CLASS/IMAGE, or train/CLASS/IMAGE and val/CLASS/IMAGE, or parquet files; or
    arrays as .npy files x and y (--data.path also takes a .npz file) of any number of axes, as for
    signal_classifier. Classes, channels, sizes, patches, mean, standard deviation, batch size,
    epochs and model size that are not given as options are inferred and printed. Without a test
    split, a part of each class is held out.

    If y of arrays has shape [N, labels] and holds 0 and 1, the model predicts whether each label
    applies; if y holds floats, it predicts values, as for regressor.
    """
    return RunConfig(
        name="image_classifier",
        data=ImageDatasetConfig(path="", test_fraction=0.15, train_crop=None, test_crop=None),
        task=ImageClassificationConfig(label_smoothing=0.1, augment=AUGMENT),
        model=ImageClassifierConfig(
            mixer=LightNetMixerConfig(num_heads=4, gate_rank=16),
            position=ToeplitzPositionConfig(hidden_states=16, bidirectional=True),
            drop_path=0.0,
            init_std=0.1,
        ),
        training=TrainingConfig(learning_rate=2e-3, checkpoint_every=10.0),
    )


def signal_classifier() -> RunConfig:
    """LightNet on your own signals, video or volumes; settings are inferred from the data.

    onescan train signal_classifier --data.path signals.npz

    The .npz file, or a folder of .npy files, holds x of shape [N, samples], [N, channels, samples]
    or [N, samples, channels], and class indices y of shape [N]. The shorter axis is assumed to hold
    the channels; if that is wrong, pass --data.channels-first or --data.no-channels-first. For
    video and volumes, the channels are the last axis if its size is 4 or less, else axis 1 if its
    size is; --data.axes sets the number of axes without channels. Settings, and whether y holds
    classes, labels or values, are inferred and printed as for image_classifier.
    """
    return dataclasses.replace(
        image_classifier(),
        name="signal_classifier",
        data=ArrayDatasetConfig(path="", test_fraction=0.15, axes=1),
        task=ImageClassificationConfig(label_smoothing=0.1, augment=None),
    )


def regressor() -> RunConfig:
    """LightNet that predicts numbers from your own signals, images, video or volumes.

    onescan train regressor --data.path signals.npz
    onescan predict runs/regressor/seed-0 new.npz --out predictions.csv

    The .npz file, or a folder of .npy files, holds x as for signal_classifier, and numbers y of
    shape [N] or [N, values]; --data.class-names names them. If each example has two axes of more
    than 4 values, they are those of an image; for signals with channels, pass --data.axes 1. Values
    are standardized for training, and predicted in their original units. Settings are inferred and
    printed as for image_classifier.
    """
    return dataclasses.replace(
        image_classifier(),
        name="regressor",
        data=ArrayDatasetConfig(path="", test_fraction=0.15, target="value"),
        task=RegressionConfig(),
    )


def segmenter() -> RunConfig:
    """LightNet that predicts a class or values at each position of signals, images or volumes.

    onescan train segmenter --data.path scans.npz
    onescan predict runs/segmenter/seed-0 new.npz --out classes.npz

    The .npz file, or a folder of .npy files, holds x as for signal_classifier, and y with the same
    axes as x: integers are the class at each position (--data.ignore-index 255 ignores positions
    with that value), and floats are values (NaN where they are unknown). Or pass a folder with
    images and masks of the same names, such as images/a.png and masks/a.png, or images/a.nii.gz and
    masks/a.nii.gz for CT and MR scans, optionally in train and val. Examples that are too large for
    memory are read in windows, such as --task.window 64 64 64. Settings are inferred and printed as
    for image_classifier.
    """
    return dataclasses.replace(
        image_classifier(),
        name="segmenter",
        data=ArrayDatasetConfig(path="", test_fraction=0.15),
        task=SegmentationConfig(),
        model=DENSE_MODEL,
    )


def text_classifier() -> RunConfig:
    """LightNet on your own texts; settings are inferred from the data.

    onescan train text_classifier --data.path FILE.csv

    FILE is a .csv, .tsv, .jsonl, .json or .parquet file with the columns text and label (to use
    others, pass --data.text-column and --data.label-column), or a folder with train.csv and
    test.csv, for example. A column named split may assign rows to the training and test parts;
    otherwise, a part of each class is held out. Tokens are bytes, or those of --data.tokenizer.
    Classes, vocabulary, length, batch size, epochs and model size that are not given as options are
    inferred and printed.
    """
    return RunConfig(
        name="text_classifier",
        data=TextTableConfig(path="", test_fraction=0.15),
        task=SequenceClassificationConfig(),
        model=SequenceClassifierConfig(
            mixer=LightNetMixerConfig(num_heads=4, gate_rank=16),
            position=ToeplitzPositionConfig(hidden_states=16, bidirectional=True),
            init_std=0.1,
        ),
        training=TrainingConfig(learning_rate=2e-3, checkpoint_every=10.0),
    )


def image_denoiser() -> RunConfig:
    """LightNet denoiser that generates images like your own; settings are inferred from the data.

    onescan train image_denoiser --data.path FOLDER
    onescan sample runs/image_denoiser/seed-0 --out images.png

    FOLDER contains CLASS/IMAGE, as for image_classifier, or images without classes. With two or
    more classes, the model generates images of a requested class (onescan sample --labels). Whole
    images are resized to at most 32 pixels; --data.image-size 64 64 makes them larger. Needs pip
    install 'onescan[train,vision,generation]'. Classes, channels, sizes, patches, batch size,
    epochs and model size that are not given as options are inferred and printed.
    --task.augment.flip 0.5 mirrors half of the training images.
    """
    return RunConfig(
        name="image_denoiser",
        data=ImageDatasetConfig(
            path="",
            test_fraction=0.1,
            mean=(HALF,) * 3,
            std=(HALF,) * 3,
            train_crop=None,
            test_crop=None,
        ),
        task=ImageGenerationConfig(
            noise=NoiseConfig(prediction="flow"),
            augment=DeitAugmentConfig(flip=0.0, num_ops=0, random_erasing=0.0),
            sampler=SamplerConfig(steps=50, guidance_scale=2.0),
            evaluation_images=360,
        ),
        model=DenoiserConfig(
            mixer=LightNetMixerConfig(num_heads=4, gate_rank=16),
            position=ToeplitzPositionConfig(hidden_states=16, bidirectional=True),
            learn_sigma=False,
            init_std=0.08,
        ),
        training=TrainingConfig(learning_rate=2e-3, weight_decay=0.0, ema_decay=0.995),
    )


def language_model() -> RunConfig:
    """LightNet that continues your own text; settings are inferred from the data.

    onescan train language_model --data.path FILE
    onescan generate runs/language_model/seed-0 --prompt "Once upon a time"

    FILE is a text file, or a folder, .jsonl, .csv or .parquet file with the column text (to use
    another, pass --data.text-column). Without a test split, the last 10% are held out. Tokens are
    bytes, or those of --data.tokenizer. Vocabulary, length, batch size, epochs and model size that
    are not given as options are inferred and printed.
    """
    return _text_model("language_model", SMALL_LM, LanguageModellingConfig())


def masked_language_model() -> RunConfig:
    """LightNet that predicts masked words of your own text; settings are inferred from the data.

    onescan train masked_language_model --data.path FILE
    onescan fill runs/masked_language_model/seed-0 "To be or not to [MASK]."

    FILE is text as for language_model, and settings are inferred in the same way. The tokenizer
    (--data.tokenizer) must have a mask token.
    """
    return _text_model("masked_language_model", SMALL_MLM, SMALL_MASKS)


def _text_model(name: str, model: ModelConfig, task: TaskConfig) -> RunConfig:
    return RunConfig(
        name=name,
        data=TextDatasetConfig(path="", length=ROW),
        task=task,
        model=model,
        training=dataclasses.replace(SMALL_TRAINING, steps=None),
    )


EVERY = {"evaluate_every", "checkpoint_every"}
RECIPES = {
    name: dataclasses.replace(
        recipe,
        infer=infer,
        inferred=INFERRED
        if name.endswith(("classifier", "regressor", "segmenter"))
        else INFERRED | EVERY,
        adapt=adapt,
    )
    for name, recipe in table(
        image_classifier,
        signal_classifier,
        regressor,
        segmenter,
        text_classifier,
        image_denoiser,
        language_model,
        masked_language_model,
    ).items()
}
