from pathlib import Path

from hvdtrain.monitor.journal import Journal


def test_an_existing_file_is_continued_or_replaced(tmp_path):
    file = tmp_path / "logs" / "a.txt"
    for mode, text, content in [("a", "one ", "one "), ("a", "two", "one two"), ("w", "3", "3")]:
        journal = Journal(file, "words", "--words", mode=mode)
        journal.write(text)
        journal.close()
        journal.close()
        assert file.read_text() == content


def test_flushed_text_is_in_the_file(tmp_path):
    file = tmp_path / "a.txt"
    journal = Journal(file, "words", "--words", mode="w")
    journal.write("a", flush=True)
    assert file.read_text() == "a"
    journal.close()


def test_a_full_disk_is_reported_once(capsys):
    journal = Journal(Path("/dev/full"), "words", "--words", mode="a")
    for _ in range(3):
        journal.write("one", flush=True)
    journal.close()
    assert capsys.readouterr().err == (
        "hvdtrain: can't write words to /dev/full: No space left on device. Training continues "
        "without it. Free disk space or choose another path (--words).\n"
    )


def test_a_missing_folder_is_reported(tmp_path, capsys):
    (tmp_path / "file").touch()
    Journal(tmp_path / "file" / "a.txt", "words", "--words", mode="a").write("one")
    assert "File exists. Training continues without it." in capsys.readouterr().err
