//! Where a copy goes. What cannot work is refused before anything is written.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// The place of a new directory: a link is followed to the empty directory that it names.
#[expect(clippy::disallowed_methods, reason = "looks at the place before any core runs")]
pub fn new_directory(path: &Path) -> Result<PathBuf, Failure> {
    let refused = |what: &str| Err(Failure::new(format!("{}: {what}", path.display())));
    // Without a slash or a dot at the end.
    let mut place: PathBuf = path.components().collect();
    if place.symlink_metadata().is_ok_and(|meta| meta.is_symlink()) {
        match place.canonicalize() {
            Ok(real) => place = real,
            Err(error) => return refused(&format!("a link that leads nowhere: {error}")),
        }
    }
    let (Some(name), Some(parent)) = (place.file_name(), place.parent()) else {
        return refused("a new directory needs a name");
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    if let (Ok(own), Ok(above)) = (std::fs::metadata(&place), std::fs::metadata(parent))
        && own.dev() != above.dev()
    {
        return refused("the root of a file system gets no other name: name a directory in it");
    }
    let mut draft = name.to_owned();
    draft.push(".tmp");
    let draft = place.with_file_name(draft);
    if draft.symlink_metadata().is_ok_and(|meta| meta.is_symlink()) {
        let what = format!("{} is in the way: it is a link; remove it", draft.display());
        return Err(Failure::new(what));
    }
    Ok(place)
}

/// Refuses a copy of `original` in `copy` if one is in the other.
pub fn refuse_nested(original: &Path, copy: &Path) -> Result<(), Failure> {
    let (inner, outer) = (real(copy), real(original));
    let relation = match (inner.starts_with(&outer), outer.starts_with(&inner)) {
        (true, true) => "is the same directory as",
        (true, false) => "is in",
        (false, true) => "contains",
        (false, false) => return Ok(()),
    };
    let (copy, original) = (copy.display(), original.display());
    Err(Failure::new(format!("{copy} {relation} {original}: name a place outside of it")))
}

/// The path without links, as far as it exists.
fn real(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut missing = Vec::new();
    for above in absolute.ancestors() {
        if let Ok(mut real) = above.canonicalize() {
            real.extend(missing.iter().rev());
            return real;
        }
        missing.extend(above.file_name());
    }
    absolute
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("millrace-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        path.canonicalize().unwrap()
    }

    #[test]
    fn a_new_directory_is_found_through_links_and_dots() {
        let base = directory("new");
        std::fs::create_dir(base.join("empty")).unwrap();
        symlink("empty", base.join("link")).unwrap();
        symlink("nothing", base.join("dangling")).unwrap();
        symlink("empty", base.join("x.tmp")).unwrap();
        for (path, expected) in [
            ("new", "new"),
            ("new/.", "new"),
            ("./new/", "new"),
            ("empty", "empty"),
            ("link", "empty"),
            ("link/.", "empty"),
        ] {
            assert_eq!(new_directory(&base.join(path)).unwrap(), base.join(expected), "{path}");
        }
        for (path, what) in [("dangling", "nowhere"), ("x", "it is a link"), ("..", "a name")] {
            let error = new_directory(&base.join(path)).unwrap_err().to_string();
            assert!(error.contains(what), "{path}: {error}");
        }
        let error = new_directory(Path::new("/proc")).unwrap_err().to_string();
        assert!(error.contains("root of a file system"), "{error}");
        std::fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn a_copy_in_its_original_is_refused_also_through_links() {
        let base = directory("nested");
        std::fs::create_dir(base.join("db")).unwrap();
        symlink("db", base.join("link")).unwrap();
        for (original, copy, what) in [
            ("db", "db", "same directory"),
            ("db", "link", "same directory"),
            ("db", "link/a/b", "is in"),
            ("link", "db/a", "is in"),
            ("db", "", "contains"),
            ("db/later", "db", "contains"),
        ] {
            let error = refuse_nested(&base.join(original), &base.join(copy)).unwrap_err();
            assert!(error.to_string().contains(what), "{original} {copy}: {error}");
        }
        for copy in ["db2", "backups/db", "db.tmp"] {
            refuse_nested(&base.join("db"), &base.join(copy)).unwrap();
        }
        std::fs::remove_dir_all(&base).unwrap();
    }
}
