from fake_component import play

if __name__ == "__main__":
    play("worker")
