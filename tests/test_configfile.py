"""The configuration file: what it may say, how flags override it, and how it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tlsched.config import LinkSettings
from tlsched.configfile import KEYS, AttachOptions, attach_options, section_title
from tlsched.errors import ConfigError
from tlsched.trust import Trust

SAMPLE = Path(__file__).parent.parent / "tlsched" / "systemd" / "tlsched.toml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tlsched.toml"


def refused(file: Path, iface: str = "eth0", **flags: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        attach_options(iface, file, flags)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_each_interface_has_a_section(file: Path) -> None:
    file.write_text("""
        [defaults]
        share = 0.1
        [link.eth0]
        rate = "10gbit"
        [link."eth0.100"]
        rate = 1000000000
        share = 0.2
        dscps = [46, 32, 24, 16, 12, 8]
        replace_root = true
    """)
    assert attach_options("eth0", file) == AttachOptions(LinkSettings("eth0", 10**10, 0.1))
    vlan = LinkSettings("eth0.100", 10**9, 0.2, (46, 32, 24, 16, 12, 8))
    assert attach_options("eth0.100", file) == AttachOptions(vlan, replace_root=True)


def test_trust_is_a_table_or_dotted_keys(file: Path) -> None:
    trust = Trust(cgroups=("/training.slice",), uids=(1001,), sources=("10.0.0.0/8",))
    file.write_text("""
        [link.eth0]
        rate = "1gbit"
        trust.cgroups = ["/training.slice"]
        trust.uids = [1001]
        trust.sources = ["10.0.0.0/8"]
        [link.eth1]
        rate = "1gbit"
        [link.eth1.trust]
        cgroups = ["/training.slice"]
        uids = [1001]
        sources = ["10.0.0.0/8"]
    """)
    assert attach_options("eth0", file).settings.trust == trust
    assert attach_options("eth1", file).settings.trust == trust


def test_flags_override_the_file_key_by_key(file: Path) -> None:
    file.write_text('[link.eth0]\nrate = "10gbit"\nshare = 0.1\ntrust.uids = [7]\n')
    flags = {"rate": "1gbit", "share": None, "trust.sources": ["10.0.0.0/8"]}
    settings = attach_options("eth0", file, flags).settings
    assert (settings.rate_bps, settings.default_share) == (10**9, 0.1)
    assert settings.trust == Trust(uids=(7,), sources=("10.0.0.0/8",))


def test_flags_alone_are_enough() -> None:
    flags = {"rate": "1gbit", "share": 0.1, "dscps": "46,32,24,16,12,8", "replace_root": None}
    wanted = LinkSettings("eth0", 10**9, 0.1, (46, 32, 24, 16, 12, 8))
    assert attach_options("eth0", None, flags) == AttachOptions(wanted)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ('rat = "1gbit"', 'the key "rat" is not known; did you mean "rate"?'),
        ('trust.cgroup = ["/a"]', 'the key "trust.cgroup" is not known'),
        ("xyz = 1", "known: rate, share"),
        ('rate = "fast"', 'rate "fast" is not understood'),
        ("rate = true", "rate = True is not understood"),
        ("rate = 1.5", "rate = 1.5 is not understood"),
        ('rate = "1gbit"\nshare = "much"', "share = 'much' is not understood"),
        ('rate = "1gbit"\nshare = 2', "out of range"),
        ('rate = "1gbit"\nshare = nan', "out of range"),
        (f'rate = "1gbit"\nshare = {"9" * 400}', "999 is not understood; write a number"),
        ('rate = "1gbit"\ndscps = [40, "x"]', "dscps = [40, 'x'] is not understood"),
        ('rate = "1gbit"\ndscps = [1]', "distinct DSCPs"),
        ('rate = "1gbit"\nreplace_root = "yes"', "write true or false"),
        ('rate = "1gbit"\ntrust = "all"', 'the key "trust" is not known'),
        ('rate = "1gbit"\ntrust.cgroups = "/a"', "trust.cgroups = '/a' is not understood"),
        ('rate = "1gbit"\ntrust.cgroups = ["a"]', "not an absolute path"),
        ('rate = "1gbit"\n[link.eth0.100]\nrate = 1', 'quote names with dots: "eth0.100"'),
    ],
)
def test_mistakes_are_refused_with_file_and_section(file: Path, section: str, words: str) -> None:
    file.write_text(f"[link.eth0]\n{section}\n")
    said = refused(file)
    assert words in said
    assert said.startswith(f"{file}, [link.eth0]: ")


def test_the_rate_may_be_left_out(file: Path) -> None:
    file.write_text('[link.eth0]\nqdisc = "prio"\nclassifier = "u32"\nshare = 0\n')
    settings = attach_options("eth0", file).settings
    assert (settings.rate_bps, settings.qdisc, settings.classifier) == (None, "prio", "u32")
    assert attach_options("eth0", None, {}).settings.rate_bps is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[defaults]\nshar = 1\n", ', [defaults]: the key "shar" is not known'),
        ("[lnik.eth0]\n", 'the section "lnik" is not known; did you mean "link"?'),
        ("link = 3\n", "link is not a section"),
        ('[link.eth1]\nrate = "1gbit"\n', "no section [link.eth0]; links there: [link.eth1]"),
        ("", "no section [link.eth0]; links there: none"),
        ("[link.eth0\n", "is not TOML: "),
        ("[link.eth0]\n[link.eth0]\n", "is not TOML: "),
        ("link.eth0 = 3\n", "no section [link.eth0]; links there: none"),
        (f"[link.eth0]\nrate = {'9' * 5000}\n", "is not TOML: "),
        (f"[link.eth0]\ntrust.uids = [0x{'f' * 5000}]\n", "is not TOML: "),
        (f"x = {'[' * 3000}", "is not TOML: "),
    ],
)
def test_files_of_another_shape_are_refused(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    said = refused(file, rate="1gbit")
    assert words in said
    assert said.startswith(str(file))


def test_a_mistake_in_anothers_section_stops_nobody(file: Path) -> None:
    file.write_text('[link.eth0]\nrate = "1gbit"\n[link.eth1]\nrat = 3\n')
    assert attach_options("eth0", file).settings.rate_bps == 10**9


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in refused(tmp_path / "absent.toml")
    assert "cannot be read (Is a directory)" in refused(tmp_path)
    (tmp_path / "latin1.toml").write_bytes(b"# \xe9\n")
    assert "is not TOML: " in refused(tmp_path / "latin1.toml")


def test_names_that_need_quotes_get_them() -> None:
    assert section_title("eth0") == "[link.eth0]"
    assert section_title("eth0.100") == '[link."eth0.100"]'


def test_the_sample_shows_every_key_and_works_when_uncommented(file: Path) -> None:
    lines = SAMPLE.read_text().splitlines()
    # What is commented out has no space after its sign, prose has.
    settings = [line[1:] for line in lines if line.startswith("#") and line[1:2].strip()]
    file.write_text("\n".join(settings).replace('"trainer"', "1000"))
    assert attach_options("eth0", file).settings.rate_bps == 10**10
    for key in KEYS:
        assert any(line.startswith(f"{key} =") for line in settings), key
    with pytest.raises(ConfigError, match="links there: none"):
        attach_options("eth0", SAMPLE)
