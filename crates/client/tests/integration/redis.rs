//! The clients against redis-server.

use crate::subject::Kind;

include!("server.rs");

#[test]
fn everything_works_with_redis() {
    let redis = Redis::start(&[]);
    crate::everything::run(&redis.address(), &client::Options::new(), false, true).unwrap();
}

#[test]
fn passwords_and_users_are_checked() {
    let redis = Redis::start(&["--requirepass", "secret"]);
    let address = redis.address();
    for kind in Kind::ALL {
        for cache in [0, 1 << 20] {
            let options = || client::Options::new().cache(cache);
            let denied =
                |options: client::Options| kind.connect(options, &address).unwrap_err().kind();
            assert_eq!(denied(options()), client::ErrorKind::Denied);
            assert_eq!(denied(options().password("wrong")), client::ErrorKind::Denied);
            assert_eq!(denied(options().user("ada").password("secret")), client::ErrorKind::Denied);
            let client = kind.connect(options().password("secret"), &address).unwrap();
            client.set("k", "v").unwrap();
            let url = format!("redis://default:secret@{address}/0");
            let client = kind.connect(options(), &url).unwrap();
            assert_eq!(client.get("k").unwrap().unwrap(), b"v");
        }
    }
}

#[test]
fn databases_are_told_apart() {
    let redis = Redis::start(&[]);
    for kind in Kind::ALL {
        let one = kind.connect(client::Options::new().database(1), &redis.address()).unwrap();
        let zero = kind.connect(client::Options::new(), &redis.address()).unwrap();
        one.set("k", "one").unwrap();
        assert_eq!(zero.get("k").unwrap(), None);
        let gone = kind.connect(client::Options::new().database(99), &redis.address());
        assert_eq!(gone.unwrap_err().kind(), client::ErrorKind::Server);
    }
}
