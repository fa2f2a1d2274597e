//! The pages: what they show, what they escape, and what cannot keep them from being written.

mod fixture;
mod trend;

use std::fs;
use std::path::{Path, PathBuf};

use fixture::{HARM, HOSTILE, Made, compared, floors, profile, put, put_text};
use forward_bench::baseline::Store;
use forward_bench::report::html::{Options, write};
use serde_json::json;

/// Where the pages of the fixture are to be put, for the browser's test.
const KEEP: &str = "FORWARD_BENCH_REPORT";

/// A store in a folder that is gone with the test.
struct Folder {
    store: Store,
    _home: tempfile::TempDir,
}

impl Folder {
    fn empty() -> Self {
        let home = tempfile::tempdir().unwrap();
        Self { store: Store { home: home.path().to_owned() }, _home: home }
    }

    fn write(&self) -> PathBuf {
        write(&self.store, &Options { repository: self.store.home.clone(), ..Options::default() }).unwrap()
    }

    fn index(&self) -> String {
        fs::read_to_string(self.write()).unwrap()
    }

    fn page(&self, id: &str) -> String {
        self.write();
        fs::read_to_string(self.store.home.join(format!("forward/case/{id}.html"))).unwrap()
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn nothing_that_a_sidecar_says_becomes_markup_and_nothing_leads_away() {
    let folder = tempfile::tempdir().unwrap();
    let home = std::env::var_os(KEEP).map_or(folder.path().to_owned(), PathBuf::from);
    let index = write(&fixture::store(&home), &Options::default()).unwrap();
    assert_eq!(index, home.join("forward/index.html"));
    let pages = files(&home.join("forward"));
    assert_eq!(pages.len(), 12, "{pages:?}");
    for page in &pages {
        let text = fs::read_to_string(page).unwrap();
        for harm in [HARM, HOSTILE, "<img", "<script>alert", "<b>\"", "onerror=\""] {
            assert!(!text.contains(harm), "{} has {harm}", page.display());
        }
        let elsewhere = text.replace("http://www.w3.org/2000/svg", "");
        assert!(!elsewhere.contains("://"), "{} leads away", page.display());
        assert!(text.contains("<svg"), "{} has no picture", page.display());
    }
    let odd = fs::read_to_string(home.join(format!("forward/case/case/odd/{HOSTILE}.html"))).unwrap();
    assert!(odd.contains("&lt;script&gt;alert(3)&lt;/script&gt;"));
    assert!(
        odd.contains("%22%3E%3Cimg%20src=x%20onerror=alert%281%29%3E%26%27%2541%23%3F%3Cscript"),
        "{odd}"
    );
}

#[test]
fn without_pictures_there_is_no_svg_and_the_numbers_stay() {
    let folder = tempfile::tempdir().unwrap();
    let store = fixture::store(folder.path());
    write(&store, &Options::default()).unwrap();
    write(&store, &Options { pictures: false, ..Options::default() }).unwrap();
    for page in files(&folder.path().join("forward")) {
        let text = fs::read_to_string(&page).unwrap();
        assert!(!text.contains("<svg"), "{}", page.display());
        assert!(!text.contains("<figure>"), "{}", page.display());
        assert!(text.contains("22738.1") || !page.ends_with("64x1@8192.html"), "{}", page.display());
    }
}

#[test]
fn a_sidecar_that_cannot_be_read_is_named_and_keeps_no_other_from_being_shown() {
    let folder = Folder::empty();
    put(&folder.store, "new", &Made::new("decode/m/fine", 100.0).json());
    put(&folder.store, "base", &Made::new("decode/m/half", 100.0).json());
    put_text(&folder.store, "decode/m/half/new", "{");
    put_text(&folder.store, "decode/m/none/new", "\u{0}");
    put_text(&folder.store, "decode/m/moved/new", &Made::new("decode/m/fine", 1.0).json().to_string());
    let mut silent = Made::new("decode/m/silent", 1.0).json();
    silent["runs"] = json!([]);
    put_text(&folder.store, "decode/m/silent/new", &silent.to_string());
    let index = folder.index();
    for words in [
        "<code>decode/m/half/new/forward.json</code>: EOF",
        "<code>decode/m/none/new/forward.json</code>: expected value",
        "it is of decode/m/fine, not of the folder that it lies in",
        "<code>decode/m/silent/new/forward.json</code>: it has no runs",
        "2 cases",
    ] {
        assert!(index.contains(words), "{words} is missing in {index}");
    }
    assert!(folder.page("decode/m/half").contains("decode/m/half/new/forward.json"));
    assert_eq!(files(&folder.store.home.join("forward")).len(), 3);
}

#[test]
fn an_empty_folder_has_a_page_that_says_so() {
    let folder = Folder::empty();
    fs::remove_dir_all(&folder.store.home).unwrap();
    assert!(folder.index().contains("There is no measurement here yet."));
    assert_eq!(files(&folder.store.home.join("forward")).len(), 1);
}

#[test]
fn pages_of_benchmarks_that_are_gone_go_too() {
    let folder = Folder::empty();
    put(&folder.store, "new", &Made::new("decode/m/stays", 100.0).json());
    put(&folder.store, "new", &Made::new("decode/n/goes", 100.0).json());
    folder.write();
    fs::write(folder.store.home.join("forward/case/decode/m/old.html.7.part"), "half").unwrap();
    fs::remove_dir_all(folder.store.folder("decode/n")).unwrap();
    let index = folder.index();
    assert!(!index.contains("goes"));
    let mut left = files(&folder.store.home.join("forward"));
    left.sort();
    let expected = ["forward/case/decode/m/stays.html", "forward/index.html"];
    assert_eq!(left, expected.map(|path| folder.store.home.join(path)));
    assert!(!folder.store.home.join("forward/case/decode/n").exists());
}

#[test]
fn both_sides_are_always_named_with_their_commits() {
    let folder = Folder::empty();
    let old = Made { commit: Some("aaaa11112222"), ..Made::new("decode/m/c", 90.0) }.json();
    for (state, word) in [("slower", "▲"), ("faster", "▼"), ("same", "="), ("ambiguous", "?")] {
        let mut new = Made { commit: Some("bbbb33334444-dirty"), ..Made::new("decode/m/c", 100.0) }.json();
        new["compared"] = compared("release", &old, state, 11.1);
        put(&folder.store, "new", &new);
        for page in [folder.index(), folder.page("decode/m/c")] {
            let body = page.split("<main").last().unwrap();
            let text: String =
                body.split('<').filter_map(|part| part.split_once('>')).map(|(_, text)| text).collect();
            for name in ["release", "aaaa11112222", "new", "bbbb33334444-dirty", state, word] {
                assert!(text.contains(name), "{name} is missing for {state}");
            }
        }
    }
}

#[test]
fn the_other_sides_kernels_are_those_that_it_was_compared_with() {
    let folder = Folder::empty();
    let id = "decode/m/c";
    let mut old = Made { date: "2026-01-01T00:00:00Z".into(), ..Made::new(id, 1000.0) }.json();
    old["profiles"] = json!([profile(1000.0, 1.0, Some("gone"))]);
    let mut new = Made::new(id, 1100.0).json();
    new["profiles"] = json!([profile(1100.0, 1.0, Some("added"))]);
    new["compared"] = compared("base", &old, "slower", 10.0);
    put(&folder.store, "new", &new);
    put(&folder.store, "base", &old);
    // 4 % of the busy time, see the fixture; a kernel on one side only.
    let page = folder.page(id);
    for words in ["−40.0 (only old)", "+44.0 (only new)", "+46.0 (+10.00 %)"] {
        assert!(page.contains(words), "{words} is missing");
    }
    // `base` has been replaced by the measurement itself: it is not the other side any more.
    put(&folder.store, "base", &new);
    let page = folder.page(id);
    assert!(page.contains("There is no trace of the other side, base"), "{page}");
    assert!(!page.contains("only old"));
    // The same measurement under another name is found, and so are kernels that came with the comparison.
    put(&folder.store, "kept", &old);
    assert!(folder.page(id).contains("−40.0 (only old)"));
    fs::remove_dir_all(folder.store.folder(id).join("kept")).unwrap();
    new["compared"]["profiles"] = old["profiles"].clone();
    put(&folder.store, "new", &new);
    assert!(folder.page(id).contains("−40.0 (only old)"));
}

#[test]
fn a_case_stands_in_the_roofline_where_its_bytes_and_flops_put_it() {
    let folder = Folder::empty();
    let mut near = Made::new("decode/m/memory", 1000.0).json();
    near["floors"] = floors(800.0, 4.26e9 * 0.8, 1e10); // 0.8 ms of reading at 4.26 TB/s
    let mut far = Made::new("prefill/m/compute", 2000.0).json();
    far["floors"] = floors(1500.0, 1e9, 7.2e14 * 1.5e-3); // 1.5 ms of computing at 720 TFLOP/s
    let mut early = Made::new("prefill/m/early", 2000.0).json();
    early["floors"] = floors(1500.0, 0.0, 0.0);
    for sidecar in [near, far, early, Made::new("decode/m/cpu", 5.0).json()] {
        put(&folder.store, "new", &sidecar);
    }
    let index = folder.index();
    let row = |case: &str| {
        let roofline = index.split("Roofline: NVIDIA H200, bfloat16").last().unwrap();
        roofline.split("<tr>").find(|row| row.contains(case)).unwrap().to_owned()
    };
    let (near, far) = (row("decode/m/memory"), row("prefill/m/compute"));
    assert!(near.contains(">0.800<") && near.contains(">memory<") && near.contains(">2.9<"), "{near}");
    assert!(near.contains(">10.0 T<") && near.contains(">12.5 T<"), "{near}");
    assert!(far.contains(">0.750<") && far.contains(">matrix product<") && far.contains(">1080.0<"), "{far}");
    assert!(index.contains("1 case has no place in it"));
    assert!(index.contains("1 of an earlier version"));
}

#[test]
fn ranks_are_compared_replay_by_replay() {
    let folder = Folder::empty();
    let mut sidecar = Made { ranks: 2, replays: 4, ..Made::new("decode/m/c", 10.0) }.json();
    sidecar["runs"][0]["ranks"][0]["samples_us"] = json!([10.0, 12.0, 11.0, 20.0]);
    sidecar["runs"][0]["ranks"][1]["samples_us"] = json!([11.0, 15.0, 19.0, 21.0]);
    put(&folder.store, "new", &sidecar);
    // Skews 1, 3, 8, 1; rank 1 is always the slowest.
    let page = folder.page("decode/m/c");
    assert!(page.contains("median 2.00 µs, at most 8.00 µs"), "{page}");
    assert!(page.contains(">100 %<"));
    put(&folder.store, "new", &Made::new("decode/m/c", 10.0).json());
    assert!(folder.page("decode/m/c").contains("One rank measured this"));
}

#[test]
fn the_histogram_counts_every_replay_of_both_sides() {
    let folder = Folder::empty();
    let old =
        Made { replays: 70, date: "2026-01-01T00:00:00Z".into(), ..Made::new("decode/m/c", 1000.0) }.json();
    let mut new = Made { replays: 130, noise: 0.02, ..Made::new("decode/m/c", 1010.0) }.json();
    new["compared"] = compared("before", &old, "same", 1.0);
    put(&folder.store, "before", &old);
    put(&folder.store, "new", &new);
    let page = folder.page("decode/m/c");
    let table = page.split("Replays by time").last().unwrap().split("</table>").next().unwrap();
    let mut sums = [0, 0];
    for row in table.split("<tr>").skip(2) {
        let cells: Vec<&str> =
            row.split("data-value=\"").skip(2).map(|cell| cell.split('"').next().unwrap()).collect();
        for (sum, cell) in sums.iter_mut().zip(&cells) {
            *sum += cell.parse::<u32>().unwrap();
        }
    }
    assert_eq!(sums, [130, 70]);
}
