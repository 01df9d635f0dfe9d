//! Names the shared library as the dynamic linker looks for it.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libmillrace.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
