"""Archives in the publishers' form become the files that the example configs read. Content of our own making."""

import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows import dataset
from pipeline.config import load
from pipeline.config.files import ROOT
from pipeline.errors import ConfigError, DataError
from pipeline.extraction.extract import extract
from pipeline.extraction.opening import SourceContext
from pipeline.extraction.public.prepare import fetch, find_set, prepare
from pipeline.extraction.public.sets import SETS, Member, PublicSet
from pipeline.transforms.plan.plan import build_plan
from storage.warehouse import Warehouse


def lines(header: str, *rows: str) -> bytes:
    return "\n".join([*([header] if header else []), *rows, ""]).encode()


NUMBERS, IDS = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
CRITEO = ",".join(["Label", *NUMBERS, *IDS])
AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)
TAOBAO = (
    "clk,btag_his,cate_his,brand_his,userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,"
    "shopping_level,occupation,new_user_class_level,adgroup_id,cate_id,campaign_id,customer,brand,price,pid,btag"
)
KUAI = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
KUAI_USERS = (
    "user_id,user_active_degree,is_lowactive_period,is_live_streamer,is_video_author,follow_user_num,"
    "follow_user_num_range,fans_user_num,fans_user_num_range,friend_user_num,friend_user_num_range,register_days,"
    "register_days_range," + ",".join(f"onehot_feat{i}" for i in range(18))
)
KUAI_VIDEOS = (
    "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,server_height,"
    "music_id,music_type,tag"
)
RATINGS = lines(
    "userId,movieId,rating,timestamp",
    *(f"{u},{m},{0.5 + (u * m) % 10 / 2},{1112486027 + u}" for u in range(1, 30) for m in range(1, 9)),
)
MOVIES = lines(
    "movieId,title,genres", '1,"American President, The (1995)",Comedy|Drama|Romance', "2,Babylon 5,(no genres listed)",
    *(f"{m},Film {m} (19{80 + m}),Action" for m in range(3, 9)),
)  # fmt: skip


def criteo(rows: int, label: int) -> bytes:
    numbers = ",".join(["", "-1", *(str(i) for i in range(11))])
    return lines(
        CRITEO,
        *(f"{label},{numbers},{','.join(['68fd1e64', '', '05110210', *['a1b2c3d4'] * 23])}" for _ in range(rows)),
    )


def avazu(rows: int, day: int) -> bytes:
    rest = "1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,ddd2926e,44956a24,1,2,15706,320,50,1722,0,35,-1,79"
    return lines(AVAZU, *(f"1000009418151094273{i},{i % 2},14102{day}0{i % 10},{rest}" for i in range(rows)))


def taobao(rows: int) -> bytes:
    row = "{click},1^2,4281^6261^4520,,{user},0,5,2,5,0,3,0,3,{ad},6261,83237,1,95471,0.0017,430548_1007,1"
    return lines(TAOBAO, *(row.format(click=i % 2, user=100 + i, ad=7 + i) for i in range(rows)))


def kuairand(first: int, days: int) -> bytes:
    row = "{user},{video},202204{day:02},1530,1649400000000,{click},0,0,0,0,0,0,7,9000,0,0,0,0,1"
    return lines(
        KUAI,
        *(
            row.format(user=u, video=v, day=first + d, click=(u + v) % 2)
            for d in range(days)
            for u in range(4)
            for v in range(5)
        ),
    )


CONTENT: dict[str, dict[str, bytes]] = {
    "criteo": {"train": criteo(40, 0) + criteo(20, 1).split(b"\n", 1)[1], "valid": criteo(5, 1), "test": criteo(5, 0)},
    "avazu": {"train": avazu(40, 1), "valid": avazu(8, 2), "test": avazu(8, 3)},
    "movielens100k": {
        "data": lines(
            "", *(f"{u}\t{m}\t{1 + (u * m) % 5}\t88125094{u % 10}" for u in range(1, 40) for m in range(1, 6))
        ),
        "users": lines("", *(f"{u}|24|M|technician|85711" for u in range(1, 40))),
        "items": lines(
            "", "1|Toy Story (1995)|01-Jan-1995||http://us.imdb.com/M/?Toy|" + "0|0|0|1|1|1|" + "|".join("0" * 13)
        ).replace(b"Toy Story", "Misérables".encode("latin-1"))
        + lines("", *(f'{m}|Film "{m}" (1996)|01-Jan-1996|||' + "|".join("0" * 18 + "1") for m in range(2, 6))),
    },
    "movielens20m": {"ratings": RATINGS, "movies": MOVIES},
    "movielens32m": {"ratings": RATINGS, "movies": MOVIES},
    "taobao_ad": {"train": taobao(60), "test": taobao(9)},
    "kuairand": {
        "first": kuairand(8, 14),
        "second": kuairand(22, 8),
        "users": lines(
            KUAI_USERS,
            *(f'{u},full_active,0,0,1,5,"(0,10]",3,"[1,10)",0,0,107,61-90,0,1,,{",".join("1" * 15)}' for u in range(4)),
        ),
        "videos": lines(
            KUAI_VIDEOS,
            *(f'{v},{70 + v},NORMAL,2022-04-06,Kmovie,0,{8000.0 + v},720,1280,{v},9.0,"12,65"' for v in range(5)),
        ),
    },
}


def small(name: str) -> PublicSet:
    """The set with our content's checksums. Its real ones are those of files that nobody may pass on."""
    one = SETS[name]
    members = {
        key: replace(member, md5=hashlib.md5(CONTENT[name][key]).hexdigest() if member.md5 else None)
        for key, member in one.members.items()
    }
    return replace(one, members=members, md5=None, rows={})


def pack(path: Path, files: Mapping[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as packed:
            for name, content in files.items():
                packed.writestr(name, content)
        return path
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def archive(name: str, folder: Path) -> Path:
    suffix = ".zip" if SETS[name].address.endswith(".zip") else ".tar.gz"
    return pack(
        folder / f"given{suffix}", {SETS[name].members[key].path: value for key, value in CONTENT[name].items()}
    )


def quiet(what: str, done: int, total: int) -> None:
    assert 0 < done <= total, what


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SETS)
def test_its_config_reads_what_the_archive_becomes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_DATA", str(tmp_path / "data"))
    counts = prepare(small(name), dataset.folder_of(name, tmp_path / "data"), archive(name, tmp_path), quiet)
    assert sum(counts.values()) > 20
    config = load(SETS[name].config)
    warehouse = Warehouse(config.warehouse, tmp_path / "home")
    context = SourceContext(config.source, config.features, warehouse, config.name, tmp_path, tmp_path / "logs")
    found = extract(context, config.ingest, (), False)
    assert found.rows == sum(counts[key] for key in counts.keys() & {"train", "valid", "test", "rows"})
    plan = build_plan(config.features, warehouse.schema(found.snapshot))
    assert len(plan.sparse) >= 4


def rows(name: str, folder: Path, table: str = "rows") -> list[dict[str, Any]]:
    prepare(small(name), folder, archive(name, folder), quiet)
    return pq.read_table(folder / f"{table}.parquet").to_pylist()


def test_criteo_keeps_text_that_looks_like_a_number_and_its_parts(tmp_path: Path) -> None:
    found = rows("criteo", tmp_path)
    assert [sum(row["split"] == part for row in found) for part in ("train", "valid", "test")] == [60, 5, 5]
    assert sum(row["label"] for row in found) == 25
    assert (found[0]["int_1"], found[0]["int_2"], found[0]["int_13"]) == (None, -1, 10)
    assert (found[0]["cat_1"], found[0]["cat_2"], found[0]["cat_3"]) == ("68fd1e64", None, "05110210")


def test_an_hour_of_avazu_becomes_day_weekday_and_hour(tmp_path: Path) -> None:
    first = rows("avazu", tmp_path)[3]
    assert (f"{first['day']}", first["weekday"], first["hour_of_day"]) == ("2014-10-21", 2, 3)  # a Tuesday
    assert "id" not in first


def test_movielens_has_stable_parts_years_and_genres(tmp_path: Path) -> None:
    found = rows("movielens20m", tmp_path, "ratings")
    for row in found:
        digest = hashlib.md5(f"{row['user_id']}:{row['item_id']}".encode()).hexdigest()
        assert row["split"] == {0: "valid", 1: "test"}.get(int(digest[:8], 16) % 10, "train")
    assert sum(row["label"] for row in found) == sum(
        0.5 + (u * m) % 10 / 2 >= 4 for u in range(1, 30) for m in range(1, 9)
    )
    items = {row["item_id"]: row for row in pq.read_table(tmp_path / "items.parquet").to_pylist()}
    assert (items[1]["release_year"], items[1]["genres"]) == ("1995", ["Comedy", "Drama", "Romance"])
    assert (items[2]["release_year"], items[2]["genres"]) == (None, None)


def test_flags_of_the_small_movielens_become_genres(tmp_path: Path) -> None:
    items = {row["item_id"]: row for row in rows("movielens100k", tmp_path, "items")}
    assert (items[1]["release_year"], items[1]["genres"]) == ("1995", ["Animation", "Children", "Comedy"])
    assert items[2]["genres"] == ["Western"]


def test_lists_of_taobao_and_kuairand_are_lists(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir(), (tmp_path / "k").mkdir()
    ad = rows("taobao_ad", tmp_path / "t")[0]
    assert (ad["btag_his"], ad["cate_his"], ad["brand_his"], ad["price"]) == ([1, 2], [4281, 6261, 4520], None, 0.0017)
    videos = rows("kuairand", tmp_path / "k", "videos")
    assert (videos[0]["tag"], videos[0]["author_id"]) == ([12, 65], "70")
    logs = pq.read_table(tmp_path / "k" / "rows.parquet")
    assert logs.column_names == ["user_id", "video_id", "day", "hour", "tab", "label"], (
        "what happened later is no feature"
    )


def test_other_content_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    given, target = archive("criteo", tmp_path), tmp_path / "target"
    with pytest.raises(
        DataError, match=r"train\.csv of given\.zip: expected MD5 4a53bb7cbc0e4ee25f9d6a73ed824b1a, got"
    ):
        prepare(SETS["criteo"], target, given, quiet)
    with pytest.raises(DataError, match="rows of part 'valid': expected 6, got 5"):
        prepare(replace(small("criteo"), rows={"valid": 6}), target, given, quiet)
    with pytest.raises(DataError, match=r"given\.zip: expected MD5 0820331067a3784d9691136f772b35a7"):
        prepare(SETS["kuairand"], target, given, quiet)
    with pytest.raises(DataError, match="expected a whole zip or tar archive with all files"):
        prepare(small("kuairand"), target, given, quiet)
    (tmp_path / "text.zip").write_text("<html>sign in</html>")
    with pytest.raises(DataError, match="expected a whole zip or tar archive"):
        prepare(small("criteo"), target, tmp_path / "text.zip", quiet)
    with pytest.raises(DataError, match=r"'.*absent\.zip': expected a file that can be read"):
        prepare(replace(small("criteo"), md5="0"), target, tmp_path / "absent.zip", quiet)
    assert list(target.iterdir()) == []


def test_a_folder_of_unpacked_files_will_do(tmp_path: Path) -> None:
    for key, content in CONTENT["movielens20m"].items():
        (tmp_path / f"{key}.csv").write_bytes(content)
    assert prepare(small("movielens20m"), tmp_path / "a", tmp_path, quiet)["items"] == 8
    (tmp_path / "movies.csv").unlink()
    with pytest.raises(DataError, match=r"expected the file movies\.csv, got none"):
        prepare(small("movielens20m"), tmp_path / "a", tmp_path, quiet)


@pytest.fixture
def server() -> Iterator[tuple[str, list[str | None]]]:
    """Serves bytes 0 to 99,999, breaks the first connection off, and notes the ranges that were asked for."""
    asked: list[str | None] = []
    content = bytes(i % 251 for i in range(100_000))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Range"])
            start = int(self.headers["Range"].split("=")[1][:-1]) if self.headers["Range"] else 0
            if start == len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : 40_000 if len(asked) == 1 else None])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/set.zip", asked
    running.shutdown()
    running.server_close()


def test_a_broken_download_goes_on_where_it_ended(server: tuple[str, list[str | None]], tmp_path: Path) -> None:
    address, asked = server
    with pytest.raises(DataError, match=r"Run it again, or fetch it with a browser and give path=set\.zip"):
        fetch(address, tmp_path / "set.zip", quiet)
    assert not (tmp_path / "set.zip").exists()
    done = fetch(address, tmp_path / "set.zip", quiet)
    assert done.read_bytes() == bytes(i % 251 for i in range(100_000))
    assert asked == [None, "bytes=40000-"]
    assert [path.name for path in tmp_path.iterdir()] == ["set.zip"]


def test_a_download_that_was_whole_or_is_damaged_is_fetched_anew(
    server: tuple[str, list[str | None]], tmp_path: Path
) -> None:
    address, asked = server
    asked.append("an earlier one")  # which broke off
    (tmp_path / "set.zip.part").write_bytes(bytes(100_000))
    with pytest.raises(DataError, match="expected a whole zip or tar archive"):
        prepare(replace(small("criteo"), address=address), tmp_path, None, quiet)
    assert asked[1:] == ["bytes=100000-", None]
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"http://127\.0\.0\.1:9/set\.zip: expected the archive, got"):
        fetch("http://127.0.0.1:9/set.zip", tmp_path / "set.zip", quiet)


def test_the_command_lists_prepares_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "find_set", lambda name: small(name) if name == "kuairand" else find_set(name))
    assert dataset.main(["kuairand", f"path={archive('kuairand', tmp_path)}", f"data={tmp_path}/data"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["status"], result["rows"]) == ("ok", {"rows": 440, "users": 4, "videos": 5})
    assert result["next"] == "dlrm end-to-end configs/public/kuairand.yaml"
    assert dataset.main([f"data={tmp_path}/data"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown if "here" in line.split()[1]] == [["kuairand", "here"]]
    assert dataset.main(["kuairandom"]) == 1
    assert "expected one of criteo, avazu" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DLRM_DATA", raising=False)
    assert dataset.parse(["criteo"])[2] == ROOT / "data", "where its config looks"
    assert dataset.parse(["criteo", "data=here"])[2] == Path("here")
    with pytest.raises(ConfigError, match="got criteo to"):
        dataset.parse(["criteo", "to=x"])


def test_every_set_has_a_checksum_for_its_archive_or_all_its_files() -> None:
    for name, one in SETS.items():
        assert one.md5 or all(isinstance(member, Member) and member.md5 for member in one.members.values()), name
