"""Files that grow while training goes on."""

from pathlib import Path

from hvdtrain.monitor.journal import Journal


def test_what_is_there_is_kept_or_written_anew(tmp_path):
    file = tmp_path / "logs" / "a.txt"
    for mode, text in [("a", "one "), ("a", "two "), ("w", "three")]:
        journal = Journal(file, "words", "--words", mode=mode)
        journal.write(text)
        journal.close()
        journal.close()
        if text == "two ":
            assert file.read_text() == "one two "
    assert file.read_text() == "three"


def test_now_is_now(tmp_path):
    file = tmp_path / "a.txt"
    journal = Journal(file, "words", "--words", mode="w")
    journal.write("a", now=True)
    assert file.read_text() == "a"
    journal.close()


def test_full_disk_is_told_once(capsys):
    journal = Journal(Path("/dev/full"), "words", "--words", mode="a")
    for _ in range(3):
        journal.write("one", now=True)
    journal.close()
    assert capsys.readouterr().err == (
        "hvdtrain: can't write words to /dev/full: No space left on device. Training goes on "
        "without. Make room there, or name another one (--words).\n"
    )


def test_no_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    Journal(tmp_path / "file" / "a.txt", "words", "--words", mode="a").write("one")
    assert "File exists. Training goes on without." in capsys.readouterr().err
