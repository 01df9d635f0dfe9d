//! The library as C programs see it: installed by `scripts/install-c`, compiled by `cc`, run.
//!
//! `MILLRACE_CFLAGS` and `MILLRACE_LDFLAGS` are added to the arguments that compile and that link:
//! for `scripts/sanitize.sh`.

mod servers;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use self::servers::{Certificates, Node, bad_line, nobody, stranger};

const HERE: &str = env!("CARGO_MANIFEST_DIR");
const PROGRAMS: [&str; 8] = [
    "basics",
    "errors",
    "queue",
    "threads",
    "client",
    "client_errors",
    "client_queue",
    "client_threads",
];

/// Where the library was installed.
static PREFIX: LazyLock<PathBuf> = LazyLock::new(|| {
    let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("install-c");
    let _absent = fs::remove_dir_all(&prefix);
    let test = std::env::current_exe().unwrap();
    run(Command::new(format!("{HERE}/../../scripts/install-c"))
        .arg(&prefix)
        .arg("--built")
        .arg(test.parent().unwrap()));
    prefix
});

/// Runs a command, which must succeed, and returns what it says.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

/// Words of a variable of the environment.
fn words(name: &str) -> Vec<String> {
    std::env::var(name).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// Compiles a program, and links it with the library.
fn compile(source: &Path, to: &Path, library: &[impl AsRef<OsStr>]) {
    let object = to.with_extension("o");
    run(Command::new("cc")
        .args(["-c", "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-g", "-pthread"])
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Wstrict-prototypes", "-Werror"])
        .args(words("MILLRACE_CFLAGS"))
        .arg("-I")
        .arg(PREFIX.join("include"))
        .arg("-o")
        .arg(&object)
        .arg(source));
    run(Command::new("cc")
        .args(["-pthread", "-o"])
        .arg(to)
        .arg(object)
        .args(library)
        .args(words("MILLRACE_LDFLAGS"))
        .args(["-lrt", "-ldl", "-lm"]));
}

/// The arguments that link the shared library.
fn shared() -> Vec<String> {
    let lib = PREFIX.join("lib");
    let lib = lib.display();
    vec![format!("-L{lib}"), "-lmillrace".to_owned(), format!("-Wl,-rpath,{lib}")]
}

fn source(program: &str) -> PathBuf {
    Path::new(HERE).join(format!("tests/c/{program}.c"))
}

fn runs(program: &str) {
    let dir = tempfile::tempdir().unwrap();
    runs_with(program, dir.path(), &[]);
}

fn runs_with(program: &str, dir: &Path, arguments: &[&str]) {
    let binary = dir.join(program);
    compile(&source(program), &binary, &shared());
    run(Command::new(binary).arg(dir).args(arguments));
}

#[test]
fn blocking_calls_do_what_they_say() {
    runs("basics");
}

#[test]
fn every_mistake_has_its_code() {
    runs("errors");
}

#[test]
fn operations_complete_through_the_queue() {
    runs("queue");
}

#[test]
fn threads_share_a_database_and_a_queue() {
    runs("threads");
}

#[test]
#[ignore = "the node that other tests start"]
fn node() {
    servers::serve();
}

#[test]
fn a_client_does_what_it_says() {
    let dir = tempfile::tempdir().unwrap();
    let certificates = Certificates::make(dir.path());
    let node = Node::start(dir.path(), Some(&certificates));
    runs_with("client", dir.path(), &[&node.address, &node.tls_address]);
}

#[test]
fn every_mistake_and_fault_of_a_client_has_its_code() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(dir.path(), None);
    let (line, nobody, stranger) = (bad_line(&node.address), nobody(), stranger());
    runs_with("client_errors", dir.path(), &[&node.address, &line, &nobody, &stranger]);
}

#[test]
fn operations_of_a_client_complete_through_the_queue() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(dir.path(), None);
    let line = bad_line(&node.address);
    runs_with("client_queue", dir.path(), &[&node.address, &line, &nobody()]);
}

#[test]
fn threads_share_a_client() {
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(dir.path(), None);
    runs_with("client_threads", dir.path(), &[&node.address]);
}

#[test]
fn the_static_library_needs_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("static");
    compile(&source("basics"), &binary, &[PREFIX.join("lib/libmillrace.a")]);
    assert!(!run(Command::new("ldd").arg(&binary)).contains("libmillrace"));
    run(Command::new(binary).arg(dir.path()));
}

/// The program of docs/EMBEDDING.md, with the command that is shown there.
#[test]
fn the_documented_program_runs() {
    let program = documented("EMBEDDING.md");
    let dir = tempfile::tempdir().unwrap();
    let (source, binary) = (dir.path().join("example.c"), dir.path().join("example"));
    let data = dir.path().join("example.db");
    assert!(program.contains("\"/tmp/example.db\""));
    fs::write(&source, program.replace("/tmp/example.db", data.to_str().unwrap())).unwrap();
    compile(&source, &binary, &shared());
    let told = run(&mut Command::new(&binary));
    assert_eq!(told, "hello = world\n1: got world\n2: got nothing\n");
    assert!(data.join("CURRENT").exists());
}

/// The program of docs/CLIENT.md.
#[test]
fn the_documented_program_of_a_client_runs() {
    let program = documented("CLIENT.md");
    let dir = tempfile::tempdir().unwrap();
    let node = Node::start(dir.path(), None);
    let (source, binary) = (dir.path().join("example.c"), dir.path().join("example"));
    assert!(program.contains("\"10.0.0.1:6379\"") && program.contains(servers::PASSWORD));
    fs::write(&source, program.replace("10.0.0.1:6379", &node.address)).unwrap();
    compile(&source, &binary, &shared());
    assert_eq!(run(&mut Command::new(&binary)), "found Ada\nuser:2 = Brian\n");
}

/// The C program of a page of the documentation.
fn documented(page: &str) -> String {
    let page = fs::read_to_string(format!("{HERE}/../../docs/{page}")).unwrap();
    let program = page.split("```c\n").nth(1).and_then(|rest| rest.split("```").next());
    program.unwrap().to_owned()
}

/// The functions that a text declares or calls.
fn functions(text: &str) -> BTreeSet<&str> {
    let starts = text.match_indices("millrace_").map(|(at, _)| at);
    starts
        .filter_map(|at| {
            let before = text[..at].chars().next_back();
            let end = text[at..].find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
            let alone = before.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '_');
            (alone && text[at + end..].starts_with('(')).then(|| &text[at..at + end])
        })
        .collect()
}

/// A text without comments.
fn code(text: &str) -> String {
    let mut parts = text.split("/*");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |code, part| code + part.split_once("*/").map_or("", |(_, rest)| rest))
}

/// The header declares exactly what the library exports, and the programs above call all of it.
#[test]
fn header_library_and_tests_have_the_same_functions() {
    let header = code(&fs::read_to_string(format!("{HERE}/include/millrace.h")).unwrap());
    let mut declared = functions(&header);
    for inline in ["millrace_str", "millrace_bytes", "millrace_unbounded"] {
        assert!(declared.remove(inline), "{inline}");
    }
    let symbols = run(Command::new("nm")
        .args(["-D", "--defined-only", "--format=posix"])
        .arg(PREFIX.join("lib/libmillrace.so")));
    let exported: BTreeSet<&str> =
        symbols.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(declared, exported);
    let programs = PROGRAMS.map(|program| fs::read_to_string(source(program)).unwrap());
    let helpers = fs::read_to_string(format!("{HERE}/tests/c/check.h")).unwrap();
    let called: BTreeSet<&str> =
        programs.iter().chain([&helpers]).flat_map(|text| functions(text)).collect();
    let missing: Vec<_> = declared.difference(&called).collect();
    assert!(missing.is_empty(), "no test calls {missing:?}");
}

#[test]
fn the_header_is_c_of_1999_and_cpp() {
    let dir = tempfile::tempdir().unwrap();
    for (compiler, standard, name) in [("cc", "-std=c99", "a.c"), ("c++", "-std=c++11", "a.cc")] {
        let source = dir.path().join(name);
        fs::write(
            &source,
            "#include <millrace.h>\nint main(void) { return millrace_version() == 0; }\n",
        )
        .unwrap();
        run(Command::new(compiler)
            .args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I"])
            .arg(PREFIX.join("include"))
            .arg(&source));
    }
}

/// What `pkg-config` would say: the package's file has the paths of the installation.
#[test]
fn the_package_file_names_the_installed_files() {
    let file = fs::read_to_string(PREFIX.join("lib/pkgconfig/millrace.pc")).unwrap();
    assert!(file.starts_with(&format!("prefix={}\n", PREFIX.display())), "{file}");
    assert!(file.contains(&format!("\nVersion: {}\n", env!("CARGO_PKG_VERSION"))), "{file}");
    assert!(!file.contains('@'), "{file}");
    let version = env!("CARGO_PKG_VERSION");
    let library = fs::canonicalize(PREFIX.join("lib/libmillrace.so")).unwrap();
    assert!(library.ends_with(format!("lib/libmillrace.so.{version}")), "{library:?}");
}
