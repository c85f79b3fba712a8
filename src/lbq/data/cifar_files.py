"""The published files of CIFAR-10 and CIFAR-100, with digests, sizes, classes and statistics.

Digests and sizes of the archives come from the dataset's home page, https://www.cs.toronto.edu/~kriz/cifar.html, those of
the python files from torchvision. Those of the binary files were computed: for CIFAR-10 from files that match their
published SHA-1, for CIFAR-100 from the verified python files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """A published file."""

    name: str
    md5: str
    size: int


@dataclass(frozen=True)
class Form:
    """One published form of a dataset: an archive with a folder of training files and, last, one test file."""

    archive: File
    folder: str
    files: tuple[File, ...]


@dataclass(frozen=True)
class Spec:
    """A dataset: its classes, its training pixels' mean and deviation, and its two forms."""

    name: str
    title: str
    classes: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    label_keys: tuple[bytes, ...]  # in the order of a binary record's label bytes; the last is the class
    binary: Form
    python: Form


_CIFAR10 = Spec(
    name="cifar10",
    title="CIFAR-10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    label_keys=(b"labels",),
    binary=Form(
        File("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),
        "cifar-10-batches-bin",
        (
            File("data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25", 30_730_000),
            File("data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692", 30_730_000),
            File("data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421", 30_730_000),
            File("data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb", 30_730_000),
            File("data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d", 30_730_000),
            File("test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d", 30_730_000),
        ),
    ),
    python=Form(
        File("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170_498_071),
        "cifar-10-batches-py",
        (
            File("data_batch_1", "c99cafc152244af753f735de768cd75f", 31_035_704),
            File("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec", 31_035_320),
            File("data_batch_3", "54ebc095f3ab1f0389bbae665268c751", 31_035_999),
            File("data_batch_4", "634d18415352ddfa80567beed471001a", 31_035_696),
            File("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb", 31_035_623),
            File("test_batch", "40351d587109b95175f43aff81a1287e", 31_035_526),
        ),
    ),
)

_FINE_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard "
    "lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear "
    "pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal "
    "shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank "
    "telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman "
    "worm"
)

_CIFAR100 = Spec(
    name="cifar100",
    title="CIFAR-100",
    classes=tuple(_FINE_CLASSES.split()),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    label_keys=(b"coarse_labels", b"fine_labels"),
    binary=Form(
        File("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),
        "cifar-100-binary",
        (
            File("train.bin", "6172c7755cfe09b2fe270c85cebc1b15", 153_700_000),
            File("test.bin", "4499cfba6c016c1be1438163640a0898", 30_740_000),
        ),
    ),
    python=Form(
        File("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437),
        "cifar-100-python",
        (
            File("train", "16019d7e3df5f24257cddd939b257f8d", 155_249_918),
            File("test", "f0ef6b0ae62326f3e7ffdfab6717acfc", 31_049_707),
        ),
    ),
)

SPECS = {spec.name: spec for spec in (_CIFAR10, _CIFAR100)}
