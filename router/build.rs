//! Client stubs of proto/, compiled by protox: no protoc is needed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../proto");
    let files = protox::compile(["dispatch/v1/engine.proto"], ["../proto"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(files)?;
    Ok(())
}
