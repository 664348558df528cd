"""Public data sets by name: where they are, what is in them, and how they become tables for the example configs.

Addresses, checksums and numbers of rows are those of the publishers, or of the BARS benchmark (Zhu et al., SIGIR 2022)
for its versions of Criteo, Avazu and TaobaoAd, which fix the rows of each part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

COMMA = "header=true, delim=','"
"""Options of DuckDB's `read_csv`."""


@dataclass(frozen=True)
class Member:
    """A text file of an archive. Empty fields are null."""

    path: str
    md5: str | None = None
    """None: the publisher gives only the archive's."""
    options: str = COMMA


@dataclass(frozen=True)
class PublicSet:
    """A data set that others publish."""

    title: str
    address: str
    licence: str
    members: Mapping[str, Member]
    tables: Mapping[str, str]
    """Parquet file to write, without its ending -> its rows in DuckDB's SQL. `{NAME}` stands for a member's rows, all
    of them text."""
    config: str
    md5: str | None = None
    """Of the archive. None: the publisher gives those of the files."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Part of the split -> its number of rows, where the publisher says so."""


def parts(select: str, *names: str) -> str:
    """The rows of members that are parts of a split."""
    return " UNION ALL ".join(f"SELECT '{name}' AS split, {select} FROM {{{name}}}" for name in names)


def by_hash(key: str, *names: str) -> str:
    """A column `split`: of ten rows, one for each of the names, and the others for training. The same everywhere."""
    cases = " ".join(f"WHEN {number} THEN '{name}'" for number, name in enumerate(names))
    return f"CASE ('0x' || md5({key})[:8])::BIGINT % 10 {cases} ELSE 'train' END AS split"


def columns(pattern: str, first: int, last: int) -> str:
    """Numbered columns."""
    return ", ".join(pattern.replace("#", str(number)) for number in range(first, last + 1))


def headerless(separator: str, *names: str) -> str:
    """Options for a file without a header."""
    return f"header=false, delim='{separator}', names=[{', '.join(map(repr, names))}]"


RATINGS = f"""SELECT userId::BIGINT AS user_id, movieId::BIGINT AS item_id, timestamp::BIGINT AS timestamp,
    epoch_ms(timestamp::BIGINT * 1000)::DATE AS day, (rating::DOUBLE >= 4)::TINYINT AS label,
    {by_hash("userId || ':' || movieId", "valid", "test")} FROM {{ratings}}"""
MOVIES = """SELECT movieId::BIGINT AS item_id,
    nullif(regexp_extract(title, '\\((\\d{4})\\)\\s*$', 1), '') AS release_year,
    CASE genres WHEN '(no genres listed)' THEN NULL ELSE string_split(genres, '|') END AS genres FROM {movies}"""
GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
"""Columns of flags in MovieLens-100K."""
FLAGS = ", ".join(f"CASE g{number} WHEN '1' THEN '{genre}' END" for number, genre in enumerate(GENRES))
GENRES_OF_FLAGS = f"list_filter([{FLAGS}], lambda genre: genre IS NOT NULL) AS genres"
TAOBAO_ROW = "userid || ':' || adgroup_id || ':' || pid"
TAOBAO = """clk::TINYINT AS label, price::DOUBLE AS price, string_split(btag_his, '^')::BIGINT[] AS btag_his,
    string_split(cate_his, '^')::BIGINT[] AS cate_his, string_split(brand_his, '^')::BIGINT[] AS brand_his,
    userid AS user_id, cms_segid, cms_group_id, final_gender_code, age_level, pvalue_level, shopping_level, occupation,
    new_user_class_level, adgroup_id, cate_id, campaign_id, customer, brand, pid"""
KUAIRAND = """user_id::BIGINT AS user_id, video_id::BIGINT AS video_id, strptime(date, '%Y%m%d')::DATE AS day,
    hourmin::BIGINT // 100 AS hour, tab::BIGINT AS tab, is_click::TINYINT AS label"""
GROUPLENS = "GroupLens: research, no commercial use without permission"
BARS = "https://huggingface.co/datasets/reczoo"

SETS: Mapping[str, PublicSet] = {
    "criteo": PublicSet(
        title="Criteo Kaggle display advertising (BARS Criteo_x4): was the ad clicked?",
        address=f"{BARS}/Criteo_x4/resolve/main/Criteo_x4.zip",
        licence="CC BY-NC-SA 4.0 (Criteo AI Lab)",
        members={
            "train": Member("train.csv", "4a53bb7cbc0e4ee25f9d6a73ed824b1a"),
            "valid": Member("valid.csv", "fba5428b22895016e790e2dec623cb56"),
            "test": Member("test.csv", "cfc37da0d75c4d2d8778e76997df2976"),
        },
        tables={
            "rows": parts(
                f"Label::TINYINT AS label, {columns('I#::DOUBLE::BIGINT AS int_#', 1, 13)}, "
                f"{columns('C# AS cat_#', 1, 26)}",
                "train",
                "valid",
                "test",
            )
        },
        rows={"train": 36_672_493, "valid": 4_584_062, "test": 4_584_062},
        config="configs/public/criteo.yaml",
    ),
    "avazu": PublicSet(
        title="Avazu mobile advertising (BARS Avazu_x4): was the ad clicked?",
        address=f"{BARS}/Avazu_x4/resolve/main/Avazu_x4.zip",
        licence="Kaggle competition rules: no commercial use, no redistribution",
        members={
            "train": Member("train.csv", "de3a27264cdabf66adf09df82328ccaa"),
            "valid": Member("valid.csv", "33232931d84d6452d3f956e936cab2c9"),
            "test": Member("test.csv", "3ebb774a9ca74d05919b84a3d402986d"),
        },
        tables={
            "rows": parts(
                "click::TINYINT AS label, strptime(hour[:6], '%y%m%d')::DATE AS day, hour[7:8]::BIGINT AS hour_of_day, "
                "dayofweek(strptime(hour[:6], '%y%m%d')) AS weekday, banner_pos, site_id, site_domain, site_category, "
                "app_id, app_domain, app_category, device_id, device_ip, device_model, device_type, device_conn_type, "
                f"C1 AS c1, {columns('C# AS c#', 14, 21)}",
                "train",
                "valid",
                "test",
            )
        },
        rows={"train": 32_343_172, "valid": 4_042_897, "test": 4_042_898},
        config="configs/public/avazu.yaml",
    ),
    "movielens100k": PublicSet(
        title="MovieLens-100K: did the user give four stars or more?",
        address="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
        licence=GROUPLENS,
        md5="0e33842e24a9c977be4e0107933c0723",
        members={
            "data": Member("ml-100k/u.data", options=headerless("\\t", "userId", "movieId", "rating", "timestamp")),
            "users": Member("ml-100k/u.user", options=headerless("|", "id", "age", "gender", "occupation", "zip")),
            "items": Member(
                "ml-100k/u.item",
                options=headerless("|", "id", "title", "released", "video", "address", *(f"g{i}" for i in range(19)))
                + ", quote='', encoding='latin-1'",
            ),
        },
        tables={
            "ratings": RATINGS.replace("{ratings}", "{data}"),
            "users": "SELECT id::BIGINT AS user_id, age::BIGINT AS age, gender, occupation, zip AS zip_code "
            "FROM {users}",
            "items": f"SELECT id::BIGINT AS item_id, released[-4:] AS release_year, {GENRES_OF_FLAGS} FROM {{items}}",
        },
        config="configs/movielens100k.yaml",
    ),
    "movielens20m": PublicSet(
        title="MovieLens-20M: did the user give four stars or more?",
        address="https://files.grouplens.org/datasets/movielens/ml-20m.zip",
        licence=GROUPLENS,
        md5="cd245b17a1ae2cc31bb14903e1204af3",
        members={"ratings": Member("ml-20m/ratings.csv"), "movies": Member("ml-20m/movies.csv")},
        tables={"ratings": RATINGS, "items": MOVIES},
        config="configs/public/movielens20m.yaml",
    ),
    "movielens32m": PublicSet(
        title="MovieLens-32M: did the user give four stars or more?",
        address="https://files.grouplens.org/datasets/movielens/ml-32m.zip",
        licence=GROUPLENS,
        md5="d472be332d4daa821edc399621853b57",
        members={"ratings": Member("ml-32m/ratings.csv"), "movies": Member("ml-32m/movies.csv")},
        tables={"ratings": RATINGS, "items": MOVIES},
        config="configs/public/movielens32m.yaml",
    ),
    "taobao_ad": PublicSet(
        title="Taobao display advertising (BARS TaobaoAd_x1): was the ad clicked? With the user's behaviour as lists",
        address=f"{BARS}/TaobaoAd_x1/resolve/main/TaobaoAd_x1.zip",
        licence="Alibaba Tianchi: research",
        members={
            "train": Member("train.csv", "eaabfc8629f23519b04593e26c7522fc"),
            "test": Member("test.csv", "f5ae6197e52385496d46e2867c1c8da1"),
        },
        tables={
            "rows": f"SELECT {by_hash(TAOBAO_ROW, 'valid')}, {TAOBAO} FROM {{train}} "
            f"UNION ALL SELECT 'test' AS split, {TAOBAO} FROM {{test}}"
        },
        rows={"test": 3_099_515},
        config="configs/public/taobao_ad.yaml",
    ),
    "kuairand": PublicSet(
        title="KuaiRand-Pure: was the short video clicked? 31 days, standard recommendations",
        address="https://zenodo.org/records/10439422/files/KuaiRand-Pure.tar.gz",
        licence="CC BY-SA 4.0 (Kuaishou)",
        md5="0820331067a3784d9691136f772b35a7",
        members={
            "first": Member("KuaiRand-Pure/data/log_standard_4_08_to_4_21_pure.csv"),
            "second": Member("KuaiRand-Pure/data/log_standard_4_22_to_5_08_pure.csv"),
            "users": Member("KuaiRand-Pure/data/user_features_pure.csv"),
            "videos": Member("KuaiRand-Pure/data/video_features_basic_pure.csv"),
        },
        tables={
            "rows": f"SELECT {KUAIRAND} FROM {{first}} UNION ALL SELECT {KUAIRAND} FROM {{second}}",
            "users": f"""SELECT user_id::BIGINT AS user_id, user_active_degree, register_days::BIGINT AS register_days,
                follow_user_num::BIGINT AS follow_user_num, fans_user_num::BIGINT AS fans_user_num,
                friend_user_num::BIGINT AS friend_user_num, {columns("onehot_feat#", 0, 17)} FROM {{users}}""",
            "videos": """SELECT video_id::BIGINT AS video_id, author_id, video_type, upload_type, music_id, music_type,
                video_duration::DOUBLE AS video_duration, server_width::DOUBLE AS server_width,
                server_height::DOUBLE AS server_height, string_split(tag, ',')::BIGINT[] AS tag FROM {videos}""",
        },
        config="configs/public/kuairand.yaml",
    ),
}
"""Name -> set."""
