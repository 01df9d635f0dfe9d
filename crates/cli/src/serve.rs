//! `millrace serve`.

use std::io::{IsTerminal, Write};

use node::{Config, Machine, NbdAddress, Ready, Settings, Size, write_list};

use crate::allocator::{allocated_bytes, return_memory_soon};
use crate::args::ServeArgs;
use crate::failure::Failure;
use crate::output::thousands;

/// Serves until a signal ends it.
pub fn run(args: ServeArgs) -> Result<(), Failure> {
    let yes = |flag: bool| flag.then_some(true);
    let flags = Settings {
        data: args.data,
        column_family: args.column_family,
        read_only: yes(args.read_only),
        durability: args.durability,
        blob_min: args.blob_min,
        blob_space_max_ratio: args.blob_space_max_ratio,
        adopt: yes(args.adopt),
        listen: args.listen,
        tls_cert: args.tls_cert,
        tls_key: args.tls_key,
        tls_ca: args.tls_ca,
        tls_crl: args.tls_crl,
        tls_auth_clients: args.tls_auth_clients,
        tls_listen: args.tls_listen,
        cores: args.cores,
        memory: args.memory,
        poll: args.poll,
        io: args.io,
        secondary: yes(args.secondary),
        salvage: yes(args.salvage),
        allow_remote: yes(args.allow_remote),
        metrics: args.metrics,
        nbd: args.nbd,
        moves: args.moves,
        moves_cert: args.moves_cert,
        moves_key: args.moves_key,
        moves_ca: args.moves_ca,
        log_level: args.log_level,
        log_format: args.log_format,
        log_file: args.log_file,
        requirepass: None,
        password_file: args.password_file,
        redis_version: args.redis_version,
        enable_debug_command: yes(args.enable_debug_command),
        disk: args.disk,
        state: args.state,
        admin: args.admin,
        sandbox: args.sandbox,
    };
    node::count_memory_with(allocated_bytes);
    let machine = Machine::look();
    let settings = match &args.config {
        Some(file) => Settings::from_file(file).map(|file| flags.or(file)),
        None => Ok(flags),
    };
    let config = settings.and_then(|settings| Config::new(settings, &machine));
    let mut config = config.or_else(|why| Config::kept_by_launcher(&machine, why))?;
    config.file = args.config;
    if config.has_little_memory() {
        return_memory_soon();
    }
    let about = config.clone();
    node::serve(config, machine, move |ready| say_ready(&about, ready))?;
    Ok(())
}

/// Prints what is served where and, on a terminal, a command to try.
fn say_ready(config: &Config, ready: &Ready) {
    let mut out = std::io::stdout().lock();
    let mut text = format!("{}\n", ready_line(config, ready));
    for disk in &ready.disks {
        text.push_str(&format!("disk {}: {}\n", disk.name, disk.socket.display()));
    }
    if let Some(addr) = ready.metrics {
        text.push_str(&format!("metrics: http://{addr}/metrics\n"));
    }
    match &ready.nbd {
        Some(NbdAddress::Tcp(addr)) => text.push_str(&format!("nbd: nbd://{addr}/DISK\n")),
        Some(NbdAddress::Unix(path)) => {
            text.push_str(&format!("nbd: nbd+unix:///DISK?socket={}\n", path.display()));
        }
        None => {}
    }
    if let Some(addr) = ready.moves {
        text.push_str(&format!("moves: {addr}/DISK\n"));
    }
    if let Some(path) = ready.admin.as_ref().filter(|_| config.data.is_none()) {
        text.push_str(&format!("admin: {}\n", path.display()));
    }
    if let Some(database) = ready.database.as_ref().filter(|_| out.is_terminal()) {
        let port = match database.listen.port() {
            6379 => String::new(),
            port => format!("-p {port} "),
        };
        let port = match database.tls_listen == Some(database.listen) {
            true => format!("{port}--tls --cacert FILE "),
            false => port,
        };
        text.push_str(&format!("try: redis-cli {port}MR.RANGE - + LIMIT 5\n"));
    }
    // Standard output may be closed; that does not affect the clients.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

fn ready_line(config: &Config, ready: &Ready) -> String {
    let cores = match config.processors.len() {
        1 => "1 core".to_owned(),
        cores => format!("{cores} cores"),
    };
    let disks = match ready.disks.len() {
        0 => None,
        1 => Some("1 disk".to_owned()),
        disks => Some(format!("{disks} disks")),
    };
    let database = config.data.as_deref().zip(ready.database.as_ref()).map(|(data, database)| {
        let about = if database.counted { "" } else { "about " };
        let how = match config.read_only {
            true => "read-only".to_owned(),
            false => format!("durability {}", config.durability),
        };
        let family = match &config.column_family[..] {
            node::DEFAULT_FAMILY => String::new(),
            name => format!("column family {name}, "),
        };
        let (data, keys) = (data.display(), thousands(database.keys));
        let listen = match database.tls_listen {
            None => database.listen.to_string(),
            Some(addr) if addr == database.listen => format!("{addr} with TLS"),
            Some(addr) => format!("{}, with TLS on {addr}", database.listen),
        };
        format!("{data} ({family}{about}{keys} keys, {how}) on {listen}")
    });
    let mut what: Vec<String> = database.into_iter().chain(disks).collect();
    if what.is_empty() {
        what.push("no disk yet".to_owned());
    }
    format!(
        "millrace {} serves {}: {cores} ({}), {}, {} of memory",
        env!("CARGO_PKG_VERSION"),
        what.join(" and "),
        write_list(&config.processors),
        ready.driver,
        Size(config.memory_bytes),
    )
}

#[cfg(test)]
mod tests {
    use node::{Database, DiskSpec};

    use super::*;

    #[test]
    fn the_line_says_what_is_served_where_and_with_what() {
        let machine = Machine::look();
        let settings = Settings {
            data: Some("/srv/db".into()),
            read_only: Some(true),
            cores: Some("1".parse().unwrap()),
            memory: Some(Size(1 << 30)),
            ..Settings::default()
        };
        let mut config = Config::new(settings, &machine).unwrap();
        let database =
            Database { listen: config.listen, tls_listen: None, keys: 4_000_000, counted: false };
        let mut ready = Ready {
            database: Some(database),
            disks: Vec::new(),
            metrics: None,
            nbd: None,
            moves: None,
            admin: None,
            driver: "io_uring",
        };
        let line = ready_line(&config, &ready);
        let rest = line.split_once(" serves ").unwrap().1;
        let cpu = config.processors[0];
        assert_eq!(
            rest,
            format!(
                "/srv/db (about 4,000,000 keys, read-only) on 127.0.0.1:6379: 1 core ({cpu}), \
                 io_uring, 1 GiB of memory"
            )
        );
        let disk: DiskSpec = "name=a uri=null:1G socket=a.sock".parse().unwrap();
        (config.data, ready.database) = (None, None);
        let line = ready_line(&config, &ready);
        assert!(line.contains("serves no disk yet: 1 core"), "{line}");
        ready.disks.push(disk);
        let line = ready_line(&config, &ready);
        assert!(line.contains("serves 1 disk: 1 core"), "{line}");
    }
}
