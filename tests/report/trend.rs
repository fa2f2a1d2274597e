//! All saved baselines of a benchmark, in the order of git's history.

use std::path::Path;
use std::process::Command;

use forward_bench::baseline::commit;
use serde_json::json;

use super::Folder;
use super::fixture::{Made, put};

fn git(folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new("git")
        .args(["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"])
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn make_commit(folder: &Path) -> &'static str {
    git(folder, &["commit", "-q", "--allow-empty", "-m", "one"]);
    git(folder, &["rev-parse", "HEAD"])[..12].to_owned().leak()
}

/// The names in the first column of the table of all measurements.
fn names(page: &str) -> Vec<String> {
    let table = page.split("id=\"trend-title\"").nth(1).unwrap().split("</table>").next().unwrap();
    let rows = table.split("<th scope=\"row\">").skip(1);
    let cells = rows.map(|row| row.split("</th>").next().unwrap());
    cells.map(|cell| cell.replace("<b>", "").replace("</b>", "")).collect()
}

#[test]
fn measurements_stand_in_the_order_of_their_commits_whenever_they_were_made() {
    let folder = Folder::empty();
    let home = folder.store.home.clone();
    git(&home, &["init", "-q"]);
    let commits: Vec<&'static str> = (0..4).map(|_| make_commit(&home)).collect();
    let id = "decode/m/c";
    let save = |name: &str, commit: Option<&'static str>, date: &str| {
        put(&folder.store, name, &Made { commit, date: date.into(), ..Made::new(id, 10.0) }.json());
    };
    // The oldest commit was measured last.
    save("first", Some(commits[0]), "2026-05-09T00:00:00Z");
    save("second", Some(commits[1]), "2026-05-02T00:00:00Z");
    save("third", Some(commits[2]), "2026-05-03T00:00:00Z");
    let dirty: &'static str = format!("{}-dirty", commits[1]).leak();
    save("second-dirty", Some(dirty), "2026-05-01T00:00:00Z");
    save("new", Some(commits[3]), "2026-05-08T00:00:00Z");
    save("base", Some(commits[3]), "2026-05-08T00:00:00Z");
    save("a-name", Some(commits[3]), "2026-05-08T00:00:00Z");
    assert_eq!(names(&folder.page(id)), ["first", "second", "second-dirty", "third", "new, base, a-name"]);
    assert!(folder.page(id).contains("In the order of the commits."));
    // Git does not know these; their dates put them before or after those that it does.
    save("unknown-early", Some("feedfeedfeed"), "2020-01-01T00:00:00Z");
    save("unknown-late", None, "2027-01-01T00:00:00Z");
    save("no-commit", Some("--output=harm"), "2026-05-04T00:00:00Z");
    let page = folder.page(id);
    assert_eq!(
        names(&page),
        [
            "unknown-early",
            "no-commit",
            "first",
            "second",
            "second-dirty",
            "third",
            "new, base, a-name",
            "unknown-late"
        ]
    );
    assert!(page.contains("3 that git does not know here by date."));
}

#[test]
fn outside_git_the_date_decides_and_unlike_configurations_are_told_of() {
    let folder = Folder::empty();
    let id = "decode/m/c";
    for (name, date) in
        [("a", "2026-03-01T00:00:00Z"), ("b", "2026-01-01T00:00:00Z"), ("new", "2026-02-01T00:00:00Z")]
    {
        put(&folder.store, name, &Made { date: date.into(), ..Made::new(id, 10.0) }.json());
    }
    let mut other = Made { date: "2026-01-15T00:00:00Z".into(), ..Made::new(id, 10.0) }.json();
    other["configuration"]["dtype"] = json!("float32");
    put(&folder.store, "c", &other);
    let page = folder.page(id);
    assert_eq!(names(&page), ["b", "c", "new", "a"]);
    assert!(page.contains("By date: git knows none of the commits here."));
    assert_eq!(page.matches("other dtype").count(), 1);
}

#[test]
fn git_orders_branches_and_knows_only_commits() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    git(folder, &["init", "-q"]);
    let root = make_commit(folder);
    let main = make_commit(folder);
    git(folder, &["checkout", "-q", "-b", "side", root]);
    git(folder, &["commit", "-q", "--allow-empty", "-m", "unlike"]);
    let side: &str = git(folder, &["rev-parse", "HEAD"])[..9].to_owned().leak();
    git(folder, &["checkout", "-q", "--orphan", "other"]);
    git(folder, &["commit", "-q", "--allow-empty", "-m", "without parents"]);
    let orphan: &str = git(folder, &["rev-parse", "HEAD"]).leak();
    let tree = git(folder, &["rev-parse", "HEAD^{tree}"]);
    let asked = [main, side, root, "0000000", tree.as_str(), "HEAD", "main", "--all", "a b"];
    let order = commit::order(folder, &asked);
    assert_eq!(order.len(), 3, "{order:?}");
    assert!(order[root] < order[main] && order[root] < order[side]);
    // Histories without a common commit have an order too.
    let order = commit::order(folder, &[main, orphan, root]);
    assert!(order.len() == 3 && order[root] < order[main], "{order:?}");
    assert!(commit::order(Path::new("/nonexistent"), &[main]).is_empty());
    assert!(commit::order(folder, &[]).is_empty());
}
